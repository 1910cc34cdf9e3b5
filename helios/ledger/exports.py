"""The names of ``helios.ledger``, imported when the first of them is used."""

from helios.ledger.compare import Difference as Difference
from helios.ledger.compare import Replay as Replay
from helios.ledger.compare import diff as diff
from helios.ledger.verification import LedgerStatus as LedgerStatus
from helios.ledger.verification import verify as verify

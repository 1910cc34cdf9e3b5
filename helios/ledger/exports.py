"""The names of ``helios.ledger``, imported when the first of them is used."""

from helios.ledger.differences import Difference as Difference
from helios.ledger.differences import Replay as Replay
from helios.ledger.differences import diff as diff
from helios.ledger.verification import LedgerStatus as LedgerStatus
from helios.ledger.verification import verify as verify

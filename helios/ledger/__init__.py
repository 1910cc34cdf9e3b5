"""The ledger of a run, and its uses: differences, verification, replays."""

from helios.ledger.compare import Difference, Replay, diff
from helios.ledger.verification import LedgerStatus, verify

__all__ = ["Difference", "LedgerStatus", "Replay", "diff", "verify"]

"""The ledger of a run, and what is made of it: differences, verification, replays."""

from helios.ledger.compare import Difference, Replay, diff
from helios.ledger.verification import LedgerStatus, verify

__all__ = ["Difference", "LedgerStatus", "Replay", "diff", "verify"]

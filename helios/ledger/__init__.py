"""The ledger of a run: what each iteration was, bound line to line by hashes."""

from helios.ledger.differences import Difference, diff
from helios.ledger.verification import LedgerStatus, verify

__all__ = ["Difference", "LedgerStatus", "diff", "verify"]

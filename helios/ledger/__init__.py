"""The ledger of a run: one line per iteration, chained by hashes."""

from helios.ledger.differences import Difference, diff
from helios.ledger.replaying import Replay
from helios.ledger.reports import RunReport, report
from helios.ledger.run_comparison import RunComparison, compare
from helios.ledger.verification import LedgerStatus, verify

__all__ = [
    "Difference",
    "LedgerStatus",
    "Replay",
    "RunComparison",
    "RunReport",
    "compare",
    "diff",
    "report",
    "verify",
]

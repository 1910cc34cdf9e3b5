"""The ledger of a run, and what is made of it: differences, verification, replays."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helios.ledger.exports import *
else:
    from helios.deferred import defer

    __getattr__, __dir__ = defer(__name__)

__all__ = ["Difference", "LedgerStatus", "Replay", "diff", "verify"]

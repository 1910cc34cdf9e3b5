"""``RunListener``: what listens to a run as a whole, beside its checkpoints.

docs/listeners.md says for each call in which thread and on which ranks it comes, and what an error
does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.best import BestValidation
from helios.checkpoint.sidecar import Sidecar
from helios.counters import TrainingState


@dataclass(frozen=True)
class Validated:
    """A validation that has ended.

    Attributes:
        scores: those that are single numbers, by name.
        state: the counters, after the validation was counted.
        has_improved: whether ``have_metrics_improved`` returned True.
        best: the best validation so far, which may be this one; ``None`` if there is none.
        by_hand: names of scores that were not summed over processes by Helios.
        losses: the mean training losses since the validation before, by name.
    """

    scores: Mapping[str, float]
    state: TrainingState
    has_improved: bool
    best: BestValidation | None
    by_hand: Collection[str]
    losses: Mapping[str, float]


class RunListener:
    """Listens to a run; by default it does nothing."""

    def opened(self) -> None:
        """Begin or continue files, once nothing can refuse the start any more."""

    def saving(self) -> Mapping[str, Any]:
        """Return the marks that the record of a checkpoint holds, by the name of their key."""
        return {}

    def before_commit(self) -> None:
        """Write what a checkpoint relies on; an ``OSError`` makes the save fail."""

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Note that a checkpoint is on the disk, with the sidecar that was written beside it."""

    def save_failed(self, path: Path, error: Exception) -> None:
        """Note that a checkpoint could not be written."""

    def validated(self, validated: Validated) -> None:
        """Note the scores of a validation."""

    def ended(self, reason: str, *, interruption: str | None) -> None:
        """Note why training has ended, or by what it was interrupted."""

    def failed(self, error: BaseException) -> None:
        """Note an error that ends the call."""

    def closed(self) -> None:
        """Write what waits, and close files, whatever has happened."""

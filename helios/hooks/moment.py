"""What happens right now in a run: the part of the context that loops change in every iteration.

Hooks see it through their context, which changes nothing of it: a batch or a loss that a hook
exchanged there would be taken by some of Helios, and not by the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from helios.data.source import BatchIterator
from helios.errors import UsageError


@dataclass(slots=True)
class Moment:
    """The current batch, loss, update and scope.

    Attributes:
        batch: the current batch.
        raw_batch: the current batch as it was fetched.
        model_outputs: what the current step returned.
        attached_loss: the current loss with its graph.
        stepping_optimizer: the optimizer that steps; ``None`` outside an optimizer step.
        is_optimizer_step_committed: whether the last update was made; ``None`` before the first.
        is_window_open: whether an accumulation window is open, whose update may still be skipped.
        skip_reason: why the current update is skipped; empty if it is not.
        exception: the exception that ended the run, for exits of contexts.
        resumed: whether the scope began before this start of the run.
        start_epoch: the epoch in which this start of the run began, from 0.
        start_step: optimizer steps made before this start.
        is_replay: whether a part of a run is only repeated.
        run_folder: folder of the run's checkpoints and records.
        training_batches: the pass over the training data; ``None`` outside one.
        went_back: whether this start went back on purpose.
    """

    batch: Any = None
    raw_batch: Any = None
    model_outputs: Any = None
    attached_loss: Tensor | None = None
    stepping_optimizer: Optimizer | None = None
    is_optimizer_step_committed: bool | None = None
    is_window_open: bool = False
    skip_reason: str = ""
    exception: BaseException | None = None
    resumed: bool = False
    start_epoch: int = 0
    start_step: int = 0
    is_replay: bool = False
    run_folder: Path | None = None
    training_batches: BatchIterator | None = None
    went_back: bool = False

    def end_batch(self) -> None:
        """Release the batch and everything computed from it."""
        self.batch = self.raw_batch = self.model_outputs = self.attached_loss = None

    def close_window(self) -> None:
        """End a window.

        Raises:
            UsageError: if a skip was requested after the update.
        """
        self.is_window_open = False
        if self.skip_reason:
            self.skip_reason = ""
            raise UsageError(
                "Context.skip_step() must be called before the update that it skips: in "
                "on_optimizer_step_start at the latest. This window's update was made already."
            )

    def take_skip(self) -> str:
        """Return why the current update is skipped, empty if it is not, and forget it."""
        reason, self.skip_reason = self.skip_reason, ""
        return reason

"""All counters of a training run.

:class:`TrainingState` counts from 1, as users see it; :class:`Cursor` addresses the next batch,
from 0. Only loops call the methods that change them.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from helios.errors import ArgumentError


class TrainingUnit(Enum):
    """The unit of ``total_steps`` and the frequencies of a run."""

    ITERATION = 0
    EPOCH = 1

    @classmethod
    def from_str(cls, label: str) -> TrainingUnit:
        """Return the unit named ``"iteration"`` or ``"epoch"``.

        Raises:
            ArgumentError: if the label is any other string (a ``ValueError``).
        """
        for unit in cls:
            if unit.name.lower() == label:
                return unit
        raise ArgumentError(f'TrainingUnit must be "iteration" or "epoch", got {label!r}.')


class Phase(Enum):
    """The current phase of a run; passed to ``Model.batch_to_device``."""

    TRAINING = "training"
    VALIDATION = "validation"
    TESTING = "testing"
    PREDICTION = "prediction"


@dataclasses.dataclass
class TrainingState:
    """The progress of a run, as users see it.

    Attributes:
        current_iteration: optimizer steps in ITERATION unit, batches in EPOCH unit.
        global_iteration: batches since the start of the run.
        global_epoch: number of the current epoch, from 1.
        validation_cycles: completed validation passes.
        dataset_iter: completed batches of the current epoch.
        early_stop_count: validation passes since the metrics last improved.
        average_iter_time: seconds per iteration without validations, averaged over the last 200.
        running_iter: iterations since the last validation.
        is_step_boundary: whether the current batch is the last of its accumulation window.
        is_step_committed: False if the update of the current accumulation window was skipped.
        global_step: optimizer updates since the start of the run, without skipped ones.
    """

    current_iteration: int = 0
    global_iteration: int = 0
    global_epoch: int = 0
    validation_cycles: int = 0
    dataset_iter: int = 0
    early_stop_count: int = 0
    average_iter_time: float = 0.0
    running_iter: int = 0
    is_step_boundary: bool = False
    is_step_committed: bool = True
    global_step: int = 0

    def dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return dataclasses.asdict(self)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch, with its number from 0."""
        self.global_epoch = epoch + 1
        self.dataset_iter = 0

    def begin_iteration(self, unit: TrainingUnit, *, is_boundary: bool) -> None:
        """Count a batch, before its first hook."""
        self.global_iteration += 1
        self.running_iter += 1
        self.is_step_boundary = is_boundary
        self.is_step_committed = True
        if is_boundary or unit is TrainingUnit.EPOCH:
            self.current_iteration += 1

    def withdraw_iteration(
        self, unit: TrainingUnit, *, was_boundary: bool, was_committed: bool
    ) -> None:
        """Undo :meth:`begin_iteration` for a batch that a hook rejected.

        Args:
            unit: the unit of the run.
            was_boundary: the previous value of ``is_step_boundary``.
            was_committed: the previous value of ``is_step_committed``.
        """
        self.global_iteration -= 1
        self.running_iter -= 1
        if self.is_step_boundary or unit is TrainingUnit.EPOCH:
            self.current_iteration -= 1
        self.is_step_boundary = was_boundary
        self.is_step_committed = was_committed

    def drop_window(self) -> None:
        """End the accumulation window without an update; the next batch starts a new one."""
        self.is_step_boundary = True
        self.is_step_committed = False

    def withdraw_step(self, unit: TrainingUnit) -> None:
        """Undo the count of a step whose update was skipped."""
        if self.is_step_committed and unit is TrainingUnit.ITERATION:
            self.current_iteration -= 1
        self.is_step_committed = False

    def restore_step(self, unit: TrainingUnit) -> None:
        """Undo :meth:`withdraw_step`: a later update of the same window was made."""
        if not self.is_step_committed and unit is TrainingUnit.ITERATION:
            self.current_iteration += 1
        self.is_step_committed = True

    def end_validation(self) -> None:
        """Count a completed validation pass."""
        self.validation_cycles += 1
        self.running_iter = 0

    def record_improvement(self, *, has_improved: bool) -> None:
        """Update the early-stop count with the result of ``have_metrics_improved``."""
        self.early_stop_count = 0 if has_improved else self.early_stop_count + 1

    def end_epoch(self) -> None:
        """End the epoch: the next batch is the first one of the next epoch."""
        self.dataset_iter = 0


@dataclasses.dataclass
class Cursor:
    """The position of the next batch, and whether the run ends at this safe point.

    Attributes:
        epoch: epoch of the next batch, from 0.
        batch: number of the next batch in that epoch, from 0.
        sample: position of that batch's first sample in the epoch's global order.
        stop_reason: why the run ends after this safe point; empty if it continues.
        step: number of the next optimizer update in that epoch, from 0.
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    stop_reason: str = ""
    step: int = 0

    def dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return dataclasses.asdict(self)

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.restart_epoch()
        self.epoch += 1

    def restart_epoch(self) -> None:
        """Move back to the first batch of the current epoch."""
        self.batch = 0
        self.sample = 0
        self.step = 0

    def stop(self, reason: str) -> None:
        """Record why the run ends at the current safe point."""
        self.stop_reason = reason

    def go_on(self) -> None:
        """Undo :meth:`stop`, because a longer run was requested."""
        self.stop_reason = ""

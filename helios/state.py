"""Every counter there is.

A run stands where its :class:`TrainingState` (numbers from 1, as users see them) and its
:class:`Cursor` (numbers from 0, as data is addressed) say. Only loops call the methods that move
them.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from helios.errors import ArgumentError


class TrainingUnit(Enum):
    """What ``total_steps`` and the frequencies of a training count."""

    ITERATION = 0
    EPOCH = 1

    @classmethod
    def from_str(cls, label: str) -> TrainingUnit:
        """Return the unit named ``"iteration"`` or ``"epoch"``.

        Raises:
            ArgumentError: for any other label (a ``ValueError``).
        """
        for unit in cls:
            if unit.name.lower() == label:
                return unit
        raise ArgumentError(f'TrainingUnit must be "iteration" or "epoch", got {label!r}.')


class Phase(Enum):
    """What a session is doing; passed to ``Model.batch_to_device``."""

    TRAINING = "training"
    VALIDATION = "validation"
    TESTING = "testing"
    PREDICTION = "prediction"


@dataclasses.dataclass
class TrainingState:
    """How far the training has come, as users read it (API section 12, H41).

    Attributes:
        current_iteration: optimizer steps in ITERATION unit, batches in EPOCH unit.
        global_iteration: batches since the start of the run.
        global_epoch: number of the epoch under way, from 1.
        validation_cycles: completed validation passes.
        dataset_iter: batches of the present epoch that are complete.
        early_stop_count: validation passes since the metrics last improved.
        average_iter_time: seconds per iteration, averaged over the last 200.
        running_iter: iterations since the last validation.
        is_step_boundary: whether the present batch is the last of its accumulation window.
        is_step_committed: whether the window that ends with the present batch made its update.
        global_step: optimizer updates that were made since the start of the run, in both units.
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
        """Return the fields as a plain dictionary."""
        return dataclasses.asdict(self)

    def begin_epoch(self, epoch: int) -> None:
        """Number a new epoch, given from 0."""
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
        """Take back a batch that was counted, and then refused by a hook.

        Args:
            unit: what the run counts.
            was_boundary: what ``is_step_boundary`` was before.
            was_committed: what ``is_step_committed`` was before.
        """
        self.global_iteration -= 1
        self.running_iter -= 1
        if self.is_step_boundary or unit is TrainingUnit.EPOCH:
            self.current_iteration -= 1
        self.is_step_boundary = was_boundary
        self.is_step_committed = was_committed

    def drop_window(self) -> None:
        """End a window without an update: the next batch begins a new one."""
        self.is_step_boundary = True
        self.is_step_committed = False

    def withdraw_step(self, unit: TrainingUnit) -> None:
        """Take back the step that was counted for a window whose update was not made (R26)."""
        if self.is_step_committed and unit is TrainingUnit.ITERATION:
            self.current_iteration -= 1
        self.is_step_committed = False

    def restore_step(self, unit: TrainingUnit) -> None:
        """Count the step again that was withdrawn: a later update of its window was made."""
        if not self.is_step_committed and unit is TrainingUnit.ITERATION:
            self.current_iteration += 1
        self.is_step_committed = True

    def end_step(self) -> None:
        """Count the update of a window, after its last hook, if it was made."""
        self.global_step += self.is_step_committed

    def end_iteration(self) -> None:
        """Count a completed batch of the epoch, after its last hook."""
        self.dataset_iter += 1

    def end_validation(self) -> None:
        """Count a completed validation pass."""
        self.validation_cycles += 1
        self.running_iter = 0

    def record_improvement(self, *, has_improved: bool) -> None:
        """Move the early-stop count by the answer of ``have_metrics_improved`` (H30)."""
        self.early_stop_count = 0 if has_improved else self.early_stop_count + 1

    def end_epoch(self) -> None:
        """Leave the epoch: the next batch is the first of another one."""
        self.dataset_iter = 0


@dataclasses.dataclass
class Cursor:
    """Where the next batch lies (DESIGN R1), and whether the run is about to end.

    Attributes:
        epoch: epoch of the next batch, from 0.
        batch: number of the next batch in that epoch, from 0.
        sample: position of that batch's first sample in the epoch's global order.
        stop_reason: why the run ends after this safe point; empty while it goes on.
        step: number of the next optimizer update in that epoch, from 0.
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    stop_reason: str = ""
    step: int = 0

    def dict(self) -> dict[str, Any]:
        """Return the fields as a plain dictionary."""
        return dataclasses.asdict(self)

    def advance(self, num_samples: int) -> None:
        """Move past one batch of the epoch."""
        self.batch += 1
        self.sample += num_samples

    def end_step(self) -> None:
        """Move past one update of the epoch."""
        self.step += 1

    def next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.restart_epoch()
        self.epoch += 1

    def restart_epoch(self) -> None:
        """Move back to the first batch of the present epoch."""
        self.batch = 0
        self.sample = 0
        self.step = 0

    def stop(self, reason: str) -> None:
        """Note that the run ends at the present safe point."""
        self.stop_reason = reason

    def go_on(self) -> None:
        """Withdraw the note of :meth:`stop`: a longer run was asked for."""
        self.stop_reason = ""

"""``RunState``: values that change during a run and are shared.

Loops write it, hooks read it through their context, and checkpoints hold a part of it. Objects that
stay the same from the start of a run to its end are in ``run_parts``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from helios.best import BestSoFar
from helios.counters import Cursor, Phase, TrainingState

if TYPE_CHECKING:
    from helios.data.source import BatchIterator


class Place(Enum):
    """The place of a process in an iteration, in words and in order."""

    STARTING = "starting"
    STEP = "in train_step"
    BACKWARD = "in backward, which exchanges gradients"
    UPDATE = "exchanging gradients"
    BOUNDARY = "ending the step"
    EVALUATION = "in an evaluation"
    AFTER_EVALUATION = "ending the evaluation"
    SAVE = "saving"
    NEXT_BATCH = "reading the next batch"


@dataclass
class Requests:
    """Requests that wait for the next safe point."""

    is_checkpoint_wanted: bool = False
    stop_reason: str = ""
    interruption: str = ""


@dataclass(kw_only=True)
class RunState:
    """The state of one call of fit, validate, test or predict.

    Attributes:
        state: the counters that users see.
        cursor: position of the next batch.
        phase: the current phase; a validation inside fit is ``Phase.VALIDATION``.
        place: where this process is, in the order of an iteration.
        num_other_batches: batches so far that were not trained on: those of evaluations, and those
            that were read again to reach the cursor.
        asked: the requests of this process.
        agreed: the requests that all processes know.
        start: the epoch and the number of optimizer steps at which this start of the run began.
        is_resumed: whether training continues from a checkpoint.
        has_changed: whether this start may compute other values than the last one, on purpose.
        is_manual: whether the model steps its optimizers itself; known after the first step.
        is_sanity_check: whether a sanity check runs, which must have no side effects.
        is_repeating: whether a step is computed a second time, which must leave no trace.
        best: the best validations so far.
        batches: the pass over the training data; ``None`` outside one.
        num_skipped_batches: batches of the epoch before the cursor that were skipped.
        batch: the current batch.
        raw_batch: the current batch as it was fetched.
        model_outputs: what the current step returned.
        loss: the current loss with its graph.
        optimizer: the optimizer that steps; ``None`` outside an optimizer step.
        is_optimizer_step_committed: whether the last update was made; ``None`` before the first.
        is_window_open: whether an accumulation window is open, whose update may still be skipped.
        skip_reason: why the current update is skipped; empty if it is not.
        exception: the exception that ended the run, for exits of contexts.
        resumed: whether the scope of a context began before this start of the run.
    """

    state: TrainingState = field(default_factory=TrainingState)
    cursor: Cursor = field(default_factory=Cursor)
    phase: Phase = Phase.TRAINING
    place: Place = Place.STARTING
    num_other_batches: int = 0
    asked: Requests = field(default_factory=Requests)
    agreed: Requests = field(default_factory=Requests)
    start: tuple[int, int] = (0, 0)
    is_resumed: bool = False
    has_changed: bool = False
    is_manual: bool | None = None
    is_sanity_check: bool = False
    is_repeating: bool = False
    best: BestSoFar = field(default_factory=BestSoFar)
    batches: BatchIterator | None = None
    num_skipped_batches: int = 0
    batch: Any = None
    raw_batch: Any = None
    model_outputs: Any = None
    loss: Tensor | None = None
    optimizer: Optimizer | None = None
    is_optimizer_step_committed: bool | None = None
    is_window_open: bool = False
    skip_reason: str = ""
    exception: BaseException | None = None
    resumed: bool = False

    @property
    def is_in_epoch(self) -> bool:
        """Whether training continues from a checkpoint that was taken inside an epoch."""
        is_numbered = self.state.global_epoch == self.cursor.epoch + 1
        return self.is_resumed and is_numbered and self.cursor.batch > 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run is finished at the next safe point."""
        return bool(self.agreed.stop_reason)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted at the next safe point."""
        return bool(self.agreed.interruption) and not self.is_stopping

    @property
    def is_leaving(self) -> bool:
        """Whether no batch follows the next safe point, for either reason."""
        return bool(self.agreed.stop_reason or self.agreed.interruption)

    def stop(self, reason: str) -> None:
        """End the run at the next safe point, for a reason that all processes know."""
        for requests in (self.asked, self.agreed):
            requests.stop_reason = requests.stop_reason or reason

    def pop_skip_reason(self) -> str:
        """Return why the current update is skipped, empty if it is not, and forget it."""
        reason, self.skip_reason = self.skip_reason, ""
        return reason

"""``LiveRun``: a call of fit, validate, test or predict while it runs.

What changes in a run is here, once: loops write it as their session, which derives from this class;
hooks read it through their context, which changes nothing of it; checkpoints hold a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from helios.best import BestSoFar
from helios.core.loss_means import LossMeans
from helios.counters import Cursor, Phase, TrainingState
from helios.data.source import BatchIterator, Source
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.findings import Findings
from helios.hooks.bus import Bus
from helios.replicas.replicas import Replicas
from helios.replicas.turns import Turns
from helios.requests import Agreement
from helios.schedule import Schedule
from helios.state.owners import Owners
from helios.storage.tensorboard_writer import TensorboardWriter

if TYPE_CHECKING:
    from helios import Model


class States(Protocol):
    """The states of plugins or of loops, by name."""

    def capture(self) -> dict[str, Any]:
        """Return their states by name."""
        ...

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give them their states."""
        ...


class NoStates:
    """Nothing with state."""

    def capture(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Do nothing."""


def find_none() -> None:
    """Return that there is nothing."""


@dataclass(kw_only=True)
class LiveRun:
    """One call of fit, validate, test or predict: its objects, its counters, and what is requested.

    Attributes:
        model: the user's model.
        engine: the engine.
        hooks: the receivers of each event.
        schedule: the options that decide when something happens.
        sources: the data of each phase that has any, one source per loader.
        find_scalars: returns the event files of this process, outside fit and on other ranks
            than 0 ``None``.
        can_save: whether checkpoints are written at all.
        loop_states: states of the loops, by role path.
        owner_states: plain attributes of plugins, data module, loops and engine.
        findings: what limits the reproducibility of the run.
        state: the counters that users see.
        cursor: position of the next batch.
        phase: what the session is doing.
        is_resumed: whether training continues from a checkpoint.
        is_manual: whether the model steps its optimizers itself; known after the first step.
        saved_randomness: the generators of the checkpoint, until training continues.
        is_sanity_check: whether a sanity check runs, which must have no side effects.
        num_skipped_batches: batches of the epoch before the cursor that were skipped.
        best: the best validations so far.
        summed_scores: the scores of the last evaluation that are those of all processes.
        is_repeating: whether a step is computed a second time, which must leave no trace.
        plugin_states: states of the plugins, by id.
        replicas: the replicas of the run, and which process runs which.
        agreement: what this process requests, and what all processes know.
        turns: the replica whose random numbers and buffers are in place.
        is_discovered: whether Helios finds the model's state: it has no ``state_dict`` of its own.
        loss_means: the training losses that people see.
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
        has_changed: whether this start may compute other values than the last one, on purpose.
        is_logging: whether numbers are being logged.
    """

    model: Model
    engine: Engine
    hooks: Bus
    schedule: Schedule = field(default_factory=Schedule)
    sources: dict[Phase, list[Source]] = field(default_factory=dict)
    find_scalars: Callable[[], TensorboardWriter | None] = find_none
    can_save: bool = False
    loop_states: States = field(default_factory=NoStates)
    owner_states: Owners = field(default_factory=Owners)
    findings: Findings = field(default_factory=Findings)
    state: TrainingState = field(default_factory=TrainingState)
    cursor: Cursor = field(default_factory=Cursor)
    phase: Phase = Phase.TRAINING
    is_resumed: bool = False
    is_manual: bool | None = None
    saved_randomness: dict[str, Any] | None = None
    is_sanity_check: bool = False
    num_skipped_batches: int = 0
    best: BestSoFar = field(default_factory=BestSoFar)
    summed_scores: dict[str, Any] = field(default_factory=dict)
    is_repeating: bool = False
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
    has_changed: bool = False
    is_logging: bool = False
    plugin_states: States = field(init=False)
    replicas: Replicas = field(init=False)
    agreement: Agreement = field(init=False)
    turns: Turns = field(init=False)
    is_discovered: bool = field(init=False)
    loss_means: LossMeans = field(init=False)

    @property
    def training_source(self) -> Source:
        """The training data."""
        return self.sources[Phase.TRAINING][0]

    @property
    def is_in_epoch(self) -> bool:
        """Whether training continues from a checkpoint that was taken inside an epoch."""
        is_numbered = self.state.global_epoch == self.cursor.epoch + 1
        return self.is_resumed and is_numbered and self.cursor.batch > 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends regularly at the next safe point."""
        return bool(self.agreement.agreed.stop_reason)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted at the next safe point."""
        return bool(self.agreement.agreed.interruption) and not self.is_stopping

    @property
    def is_leaving(self) -> bool:
        """Whether no batch follows the next safe point, for either reason."""
        agreed = self.agreement.agreed
        return bool(agreed.stop_reason or agreed.interruption)

    def end_batch(self) -> None:
        """Release the batch and everything computed from it."""
        self.batch = self.raw_batch = self.model_outputs = self.attached_loss = None

    def end_window(self) -> None:
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

    def pop_skip_reason(self) -> str:
        """Return why the current update is skipped, empty if it is not, and forget it."""
        reason, self.skip_reason = self.skip_reason, ""
        return reason

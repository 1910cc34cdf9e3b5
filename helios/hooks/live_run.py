"""``LiveRun``: a call of fit, validate, test or predict while it runs.

Hooks read it through their context, and checkpoints hold a part of it. The session, which loops
see, derives from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from helios.best import BestSoFar
from helios.core.loss_means import LossMeans
from helios.core.summands import as_number
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.findings import Findings
from helios.hooks.bus import Bus
from helios.hooks.moment import Moment
from helios.replicas.replicas import Replicas
from helios.replicas.turns import Turns
from helios.requests import Agreement, Requests
from helios.schedule import Schedule
from helios.state import Cursor, Phase, TrainingState
from helios.state_graph.owner_states import Owners
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
        moment: what happens right now, as hooks see it.
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
    moment: Moment = field(default_factory=Moment)
    plugin_states: States = field(init=False)
    replicas: Replicas = field(init=False)
    agreement: Agreement = field(init=False)
    turns: Turns = field(init=False)
    is_discovered: bool = field(init=False)
    loss_means: LossMeans = field(init=False)
    _is_logging: bool = False

    @property
    def requests(self) -> Requests:
        """The requests made in this process."""
        return self.agreement.asked

    @property
    def agreed(self) -> Requests:
        """The requests of any process, as far as all processes know them."""
        return self.agreement.agreed

    @property
    def training_source(self) -> Source:
        """The training data."""
        return self.sources[Phase.TRAINING][0]

    @property
    def is_manual_mode(self) -> bool:
        """Whether the model is known to step its optimizers itself."""
        return bool(self.is_manual)

    def find_optimizers(self) -> dict[str, Any]:
        """Return the optimizers of the model, by attribute path."""
        return self.model.discovery.optimizers()

    def find_schedulers(self) -> dict[str, Any]:
        """Return the learning-rate schedulers of the model, by attribute path."""
        return self.model.discovery.schedulers()

    def find_loader(self) -> DataLoader[Any] | None:
        """Return the loader of the current phase; the first of several, ``None`` if none."""
        sources = self.sources.get(self.phase)
        return sources[0].loader if sources else None

    def indices_of(self, place: Cursor) -> list[Any] | None:
        """Return the indices of the samples of a training batch; ``None`` if unknown."""
        return self.training_source.indices(place.epoch, batch=place.batch, sample=place.sample)

    @property
    def is_in_epoch(self) -> bool:
        """Whether training continues from a checkpoint that was taken inside an epoch."""
        is_numbered = self.state.global_epoch == self.cursor.epoch + 1
        return self.is_resumed and is_numbered and self.cursor.batch > 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends regularly at the next safe point."""
        return bool(self.agreed.stop_reason)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted at the next safe point."""
        return bool(self.agreed.interruption) and not self.is_stopping

    @property
    def is_leaving(self) -> bool:
        """Whether no batch follows the next safe point, for either reason."""
        return bool(self.agreed.stop_reason or self.agreed.interruption)

    def request_checkpoint(self) -> None:
        """Request a checkpoint at the next safe point."""
        self.agreement.check_open("Context.request_checkpoint()")
        self.requests.is_checkpoint_wanted = True

    def request_stop(self, reason: str) -> None:
        """Request the end of the run at the next safe point; the first reason counts."""
        self.agreement.check_open("Context.request_stop()")
        self.requests.stop_reason = self.requests.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """Request a checkpoint and an early return at the next safe point."""
        self.agreement.check_open("Context.interrupt()")
        self.requests.interruption = self.requests.interruption or reason

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Log numbers by name, for the current iteration; reads tensors from their device."""
        files = self.find_scalars()
        is_wanted = files is not None or "on_log" in self.hooks.active
        if self.is_sanity_check or self.is_repeating or not is_wanted or not scalars:
            return
        if self._is_logging:
            raise UsageError(
                "Context.log(...) must not be called in on_log, because it calls on_log itself and "
                "would never return. Log in another event."
            )
        numbers = {name: as_number(name, value) for name, value in scalars.items()}
        step = self.state.global_iteration
        for name, value in numbers.items():
            # One that user code has written at this iteration, as scripts of Helios 1 do, is kept.
            if files is not None and not files.has_point(name, step):
                files.add_scalar(name, value, step)
        self._is_logging = True
        try:
            self.hooks.emit("on_log", numbers, self.state)
        finally:
            self._is_logging = False

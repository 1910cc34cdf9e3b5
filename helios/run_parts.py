"""``RunParts``: the objects of a run, which stay the same from its start to its end.

A start creates them once. Loops take what they need when they are attached, and hooks see them
through their context; values that change are in the ``RunState``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.checkpoint.frozen import FrozenWeights
from helios.checkpoint.record import Record
from helios.core.loss_means import LossLog, LossMeans
from helios.counters import Phase
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.findings import Findings
from helios.hooks.bus import Bus, check_overrides, check_state_methods
from helios.hooks.context import Context
from helios.hooks.events import EVENTS, Receiver
from helios.listeners import Iteration, IterationListener, Listeners, RunListener
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.plugin import Plugin
from helios.replicas.gradients import Gradients
from helios.replicas.replica_runner import ReplicaRunner, SharedReplicaRunner
from helios.replicas.replicas import Replicas
from helios.requests import Agreement, LoneAgreement, SharedAgreement
from helios.run_state import RunState
from helios.schedule import Schedule
from helios.state.owners import Owners, OwnStates
from helios.state.steps import IdleWatch, ReplicaWatch
from helios.storage.tensorboard_writer import TensorboardWriter
from helios.terminal.progress import Display

_OF_ENGINES = [event.name for event in EVENTS.values() if Receiver.ENGINE in event.receivers]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunParts:
    """The objects of one call of fit, validate, test or predict.

    Attributes:
        model: the user's model.
        engine: the engine.
        hooks: the receivers of each event.
        display: the progress bars.
        seed: the run's seed.
        run: what changes during the run.
        schedule: the options that decide when something happens.
        sources: the data of each phase that has any, one source per loader.
        plugins: by id, in order of registration.
        find_loops: returns the loops with a state, by role path.
        schedulers: the learning-rate schedulers; ``None`` outside fit.
        writer: writes checkpoints; ``None`` outside fit.
        can_save: whether checkpoints are written at all.
        recorders: what listens to the iterations, besides means of losses, logs and display.
        run_listeners: what listens to the run.
        get_scalars: returns the event files of this process, outside fit and on other ranks than 0
            ``None``.
        sanity_steps: batches of the sanity check, as set by ``Trainer(sanity_steps=...)``.
        owner_states: plain attributes of plugins, data module, loops and engine.
        findings: what limits the reproducibility of the run.
        frozen: frozen state that checkpoints only refer to; ``None`` if they hold everything.
        run_folder: folder of the run's checkpoints and records.
        is_replay: whether a part of a run is only repeated.
        outside: returns why the run is to be interrupted, if the reason came from outside.
        check_record: refuses a record that must not be saved, before hooks see it.
        note_last_safe_point: called before the save at a safe point that no batch follows.
        finish_load: called after ``on_training_resume``, which may restore the data: compares it
            with that of the checkpoint, and then restores the generators. Takes whether the epoch
            of the checkpoint is complete.
        check_data: called after the hook that begins an epoch, which may change the data.
    """

    model: Model
    engine: Engine
    hooks: Bus
    display: Display
    seed: int
    run: RunState = field(default_factory=RunState)
    schedule: Schedule = field(default_factory=Schedule)
    sources: dict[Phase, list[Source]] = field(default_factory=dict)
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    find_loops: Callable[[], Mapping[str, Any]] = dict
    schedulers: Schedulers | None = None
    writer: CheckpointWriter | None = None
    can_save: bool = False
    recorders: Sequence[IterationListener] = ()
    run_listeners: Sequence[RunListener] = ()
    get_scalars: Callable[[], TensorboardWriter | None] = lambda: None
    sanity_steps: int = 0
    owner_states: Owners = field(default_factory=Owners)
    findings: Findings = field(default_factory=Findings)
    frozen: FrozenWeights | None = None
    run_folder: Path | None = None
    is_replay: bool = False
    outside: Callable[[], str] = str
    check_record: Callable[[Record], None] = lambda record: None
    note_last_safe_point: Callable[[], None] = lambda: None
    finish_load: Callable[[bool], None] = lambda is_complete: None
    check_data: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if type(self.engine) is not Engine:
            check_overrides(self.engine, Engine, receives=_OF_ENGINES)
            check_state_methods(self.engine, Engine)

    @property
    def training_source(self) -> Source:
        """The training data."""
        return self.sources[Phase.TRAINING][0]

    def find_batch_size(self) -> int | None:
        """Return the samples of the training batch of the current replica; ``None`` if unknown."""
        batches, replica = self.run.batches, self.runner.replica
        if batches is None:
            return None
        # Replica 0 is the first one of its process.
        return batches.size(self.replicas.local_replicas.index(replica) if replica else 0)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas of the run, and which process runs which."""
        return self.engine.replicas

    @cached_property
    def gradients(self) -> Gradients:
        """The gradients of the replicas."""
        return self.engine._gradients

    @cached_property
    def context(self) -> Context:
        """The run as hooks see it."""
        return Context(self)

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement of all processes on requests."""
        if self.replicas.has_single_replica:
            return LoneAgreement(self.run, self.outside, self.writer)
        return SharedAgreement(self.run, self.outside, self.writer, self.replicas)

    @cached_property
    def loss_means(self) -> LossMeans:
        """The means of training losses to log."""
        return LossMeans()

    @cached_property
    def iteration(self) -> Iteration:
        """The iteration that listeners get at its end, one reused object."""
        return Iteration(self.run.state, self.loss_means)

    @cached_property
    def listeners(self) -> Listeners:
        """All listeners to the iterations."""
        log = LossLog(self.loss_means, self.context.log, self.replicas.gather_by_replica)
        logs = (log,) if self.schedule.logs else ()
        return Listeners((self.loss_means, *logs, self.display, *self.recorders))

    @cached_property
    def plugin_states(self) -> OwnStates:
        """States of the plugins, by id."""
        gone = "plugin that is not registered", "register the plugin"
        return self._own_states(lambda: self.plugins, gone)

    @cached_property
    def loop_states(self) -> OwnStates:
        """States of the loops, by role path."""
        return self._own_states(self.find_loops, ("loop that is not connected", "connect the loop"))

    def _own_states(
        self, find: Callable[[], Mapping[str, Any]], gone: tuple[str, str]
    ) -> OwnStates:
        # Only a training run reports what is missing of a checkpoint.
        return OwnStates(find, gone, carries=self.writer is not None)

    @cached_property
    def idle_watch(self) -> IdleWatch:
        """Detects that the steps of a new run learn nothing."""
        return IdleWatch(self.model, self.owner_states, self.replicas.gather_objects)

    @cached_property
    def runner(self) -> ReplicaRunner:
        """Runs the steps of the replicas of this process."""
        return self.shared_runner or ReplicaRunner(self.seed, self.iteration)

    @cached_property
    def shared_runner(self) -> SharedReplicaRunner | None:
        """The runner if there are several replicas; ``None`` for a single one."""
        if self.replicas.has_single_replica:
            return None
        watch = ReplicaWatch(
            type(self.model).__name__,
            self.model.discovery,
            self.owner_states,
            findings=self.findings,
            gather=self.replicas.gather_objects,
        )
        return SharedReplicaRunner(
            self.replicas,
            self.seed,
            self.model,
            self.gradients,
            self.iteration,
            watch,
            self.agreement,
        )

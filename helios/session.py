"""What a loop may see: the model, the data, the engine, the hooks, the counters and the options.

A session holds no order of things (loops do) and opens no file: snapshots go out through the
``Recorder`` that the house hands in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from helios.checkpoint.capture import capture
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import list_missing
from helios.checkpoint.run_protocols import NoOwners, NoStates, OwnerStates, States
from helios.core import rng
from helios.core.scalars import as_number, as_numbers
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.engines.process_member import redefines
from helios.errors import StateError, UsageError
from helios.hooks.bus import Bus
from helios.hooks.context import Context
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.plugin import Plugin
from helios.plugins.plugin_states import PluginStates
from helios.protocols import Recorder
from helios.replicas.replica_state import Turns, make_turns
from helios.replicas.replicas import Replicas
from helios.requests import Agreement, Requests, make_agreement
from helios.run_state.consistency import check_alike
from helios.run_state.replica_watch import ReplicaWatch
from helios.schedule import Schedule
from helios.state import Cursor, Phase, TrainingState
from helios.terminal.progress import Display

_LOGGER = logging.getLogger(__name__)


_MODEL = "<model>"


def _do_nothing() -> None:
    return


# What an engine does behind the gradients.
_UPDATE = (
    "average_gradients",
    "unscale_gradients",
    "clip_gradients",
    "optimizer_step",
    "zero_grad",
    "close_window",
)


@dataclass
class Session:
    """One call of fit, validate, test or predict, as its loops see it.

    Attributes:
        model: the user's model.
        engine: the device and what it does.
        hooks: who hears what.
        display: the progress bars.
        seed: the run's seed.
        schedule: the options that decide when something happens.
        sources: the data of each phase that has some, one source for each loader.
        plugins: by id, in order of registration.
        schedulers: the learning-rate schedulers; ``None`` outside of fit.
        recorder: where checkpoints and scalars go; ``None`` outside of fit.
        can_save: whether checkpoints are written at all.
        trial_steps: batches of the trial validation that ``Trainer(sanity_steps=...)`` asks for.
        loop_states: those of the loops, by role path.
        owner_states: the plain attributes of plugins, data module, loops and engine.
        missing: what no checkpoint of the run holds, known before it began: place and reason.
        claims: whose word the level of the run rests on.
        refuses_incomplete: whether a checkpoint that lacks something is an error.
        note_last_safe_point: called at a safe point that no batch follows, before it saves.
        outside: gives the reason for which the run is to break off, if it came from outside.
        state: the counters that users see.
        cursor: where the next batch lies.
        phase: what the session is doing.
        is_resumed: whether the training goes on from a checkpoint.
        is_manual: whether the model steps its optimizers itself; known after the first step.
        replicas: the replicas of the run, and who carries them.
        leaves_batches: whether batches are used where they are, by the model's own rule.
        is_plain: whether steps run in no context of the engine's.
        agreement: what this process asks for, and what all of them know.
        turns: whose random numbers and buffers are in place.
        obstacles: what training has found that binds the run to its number of processes.
        unshared: paths of what every replica changes in the model on its own.
        saved_randomness: the generators of the checkpoint, until the training goes on.
        saved_length: the samples of the checkpoint's epoch; ``None`` where nobody knows them.
        allows_other_length: whether the epoch may have another number of them.
        is_sanity_check: whether a trial validation runs, which must leave no trace (C17).
        plugin_states: those of the plugins, by id.
        context: what hooks may see of all this.
    """

    model: Model
    engine: Engine
    hooks: Bus
    display: Display
    seed: int
    schedule: Schedule = field(default_factory=Schedule)
    sources: dict[Phase, list[Source]] = field(default_factory=dict)
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    schedulers: Schedulers | None = None
    recorder: Recorder | None = None
    can_save: bool = False
    trial_steps: int = 0
    loop_states: States = field(default_factory=NoStates)
    owner_states: OwnerStates = field(default_factory=NoOwners)
    missing: dict[str, str] = field(default_factory=dict)
    claims: list[str] = field(default_factory=list)
    refuses_incomplete: bool = False
    note_last_safe_point: Callable[[], None] = _do_nothing
    state: TrainingState = field(default_factory=TrainingState)
    cursor: Cursor = field(default_factory=Cursor)
    outside: Callable[[], str] = str
    phase: Phase = Phase.TRAINING
    is_resumed: bool = False
    is_manual: bool | None = None
    saved_randomness: dict[str, Any] | None = None
    saved_length: int | None = None
    allows_other_length: bool = False
    is_sanity_check: bool = False
    context: Context = field(init=False)
    plugin_states: PluginStates = field(init=False)
    replicas: Replicas = field(init=False)
    leaves_batches: bool = field(init=False)
    is_plain: bool = field(init=False)
    agreement: Agreement = field(init=False)
    turns: Turns = field(init=False)
    obstacles: list[str] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    _is_logging: bool = False

    def __post_init__(self) -> None:
        # Asked in every iteration, and the same in all of them.
        self.replicas = self.engine.replicas
        is_there = self.engine.device.type == "cpu"
        self.leaves_batches = is_there and type(self.model).batch_to_device is Model.batch_to_device
        has_own = redefines(self.engine, Engine, "autocast")
        self.is_plain = not self.engine.precision.casts and not has_own
        self.context = Context(self)
        # Without a training no plugin that is gone is missed.
        self.plugin_states = PluginStates(self.plugins, carries=self.recorder is not None)
        self.agreement = make_agreement(self.replicas, self._look_around, self.context.take_skip)
        watch = ReplicaWatch(self, self.replicas.gather_objects)
        self.turns = make_turns(self.replicas, self.seed, self.model, watch, self.agreement)

    @property
    def requests(self) -> Requests:
        """What was asked for in this process."""
        return self.agreement.asked

    @property
    def agreed(self) -> Requests:
        """What all processes know that any of them has asked for."""
        return self.agreement.agreed

    def add_obstacle(self, text: str) -> bool:
        """Note what binds the run to its number of processes; returns whether it is new."""
        is_new = text not in self.obstacles
        if is_new:
            self.obstacles.append(text)
        return is_new

    @property
    def training_source(self) -> Source:
        """The data of the training."""
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
        """Return the loader of the present phase; the first one of several, ``None`` for none."""
        sources = self.sources.get(self.phase)
        return sources[0].loader if sources else None

    def indices_of(self, place: Cursor) -> list[Any] | None:
        """Return the indices of the samples of a training batch; ``None`` if nobody knows them."""
        return self.training_source.indices(place.epoch, batch=place.batch, sample=place.sample)

    @property
    def sanity_steps(self) -> int:
        """Batches of the trial validation, for which an option or a plugin asks (C17)."""
        return max(self.trial_steps, *(each.sanity_steps for each in self.plugins.values()), 0)

    @property
    def trial_length(self) -> int | None:
        """The most batches of each loader while a trial validation runs, else ``None``."""
        return self.sanity_steps if self.is_sanity_check else None

    def seed_evaluation(
        self, pass_number: int, step: int, loader: int = 0, replica: int | None = None
    ) -> None:
        """Set the random numbers of one batch of an evaluation.

        Args:
            pass_number: number of the pass.
            step: number of the batch in its loader.
            loader: number of the loader.
            replica: whose batch it is, where there are several; ``None`` for their hooks.
        """
        which: tuple[int | str, ...] = (loader,) if loader else ()
        if replica is not None:
            which = (*which, "replica", replica)
        rng.reseed(rng.key(self.seed, self.phase.value, pass_number, step, *which))

    @contextmanager
    def entering(self, phase: Phase, pass_number: int) -> Iterator[None]:
        """Run an evaluation: on random numbers of its own, with those found restored."""
        found = self.phase
        self.phase = phase
        try:
            with rng.stream(rng.key(self.seed, phase.value, pass_number)):
                yield
        finally:
            self.phase = found

    def restore_randomness(self) -> None:
        """Set the generators as the checkpoint holds them; last of all (H6)."""
        if self.saved_randomness is not None:
            rng.load_rng_state_dict(self.saved_randomness)
            self.saved_randomness = None

    @property
    def is_in_epoch(self) -> bool:
        """Whether the training goes on from a checkpoint that was taken inside of an epoch."""
        is_numbered = self.state.global_epoch == self.cursor.epoch + 1
        return self.is_resumed and is_numbered and self.cursor.batch > 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run comes to its regular end at the next safe point."""
        return bool(self.agreed.stop_reason)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run breaks off at the next safe point, unfinished."""
        return bool(self.agreed.interruption) and not self.is_stopping

    @property
    def is_leaving(self) -> bool:
        """Whether no batch follows the next safe point, for either reason."""
        return bool(self.agreed.stop_reason or self.agreed.interruption)

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint at the next safe point (DESIGN R4)."""
        self.agreement.check_open("Context.request_checkpoint()")
        self.requests.is_checkpoint_wanted = True

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the run at the next safe point; the first reason counts."""
        self.agreement.check_open("Context.request_stop()")
        self.requests.stop_reason = self.requests.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """Ask for a checkpoint and an early return at the next safe point."""
        self.agreement.check_open("Context.interrupt()")
        self.requests.interruption = self.requests.interruption or reason

    def _look_around(self) -> bool:
        """Ask for what comes from outside; returns whether a save of this process has failed."""
        reason = self.outside()
        if reason:
            self.interrupt(reason)
        return self.recorder is not None and self.recorder.has_failed

    def agree(self, *, ends_window: bool = False) -> bool:
        """Let every process know what any of them has asked for; all call it at one place.

        What is asked for behind it waits for the next time, in all processes.

        Args:
            ends_window: whether a window ends here: what all were told in front of its gradients
                is then not asked again, unless somebody could ask for something since.

        Returns:
            Whether anything is asked for.

        Raises:
            Exception: that of a save which has failed since the last time, in all processes.
        """
        is_alarm = self.agreement.settle(ends_window=ends_window)
        if is_alarm and self.recorder is not None:
            self.recorder.raise_failure()
        agreed = self.agreement.agreed
        return bool(agreed.stop_reason or agreed.interruption or agreed.is_checkpoint_wanted)

    def stop(self, reason: str) -> None:
        """End the run at the next safe point, for a reason that all processes know."""
        for requests in (self.requests, self.agreed):
            requests.stop_reason = requests.stop_reason or reason

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Log numbers by name, as of the present iteration; reads tensors from their device."""
        is_written = self.recorder is not None and self.recorder.logs_scalars
        is_wanted = is_written or "on_log" in self.hooks.heard
        if self.is_sanity_check or not is_wanted or not scalars:
            return
        if self._is_logging:
            raise UsageError(
                "Context.log(...) must not be called in on_log, which it tells: it would never "
                "end. Log in another event."
            )
        numbers = {name: as_number(name, value) for name, value in scalars.items()}
        if self.recorder is not None:
            self.recorder.log_scalars(numbers, self.state)
        self._is_logging = True
        try:
            self.hooks.emit("on_log", numbers, self.state)
        finally:
            self._is_logging = False

    def log_losses(self) -> None:
        """Log the losses of the present batch."""
        self.log({f"train/{name}": loss for name, loss in self.model.loss_items.items()})

    def log_scores(self) -> None:
        """Log the validation scores that are single numbers."""
        self.log({f"valid/{name}": score for name, score in as_numbers(self.model.metrics).items()})

    def save(self) -> None:
        """Write a checkpoint of this safe point, if any are written and this one is not there."""
        # Where a poll behind the save ends the run, the checkpoint is there already.
        if not self.can_save or self.recorder is None or self.recorder.has_saved(self.state):
            return
        self.check_alike()
        if self.is_leaving:
            self.note_last_safe_point()
        record = self.capture()
        self._check_complete(record)
        snapshot = record.snapshot()
        self.hooks.emit("on_save_checkpoint", snapshot)
        meters = {**self.model.discovery.values.meters, **self.owner_states.meters}
        self.recorder.save(snapshot, meters)

    def begin_training(self) -> None:
        """Note that the start events are over: what they set up, every start sets up again."""
        if any(redefines(self.engine, Engine, name) for name in _UPDATE):
            self.agreement.doubt()
        self.agreement.begin(self.hooks.asking)
        if self.can_save:
            self.model.discovery.begin_training()
            self.owner_states.begin_training()

    def check_alike(self) -> None:
        """Check that all processes have the same weights; a ``UsageError`` if they have not.

        With the same message rank 0, which writes, says what takes too long to be saved, so that
        all leave out the same.
        """
        self.replicas.compare(self._check_alike)

    def _check_alike(self, gather: Callable[[Any], list[Any]]) -> None:
        costs, owners = self.model.discovery.values.costs, self.owner_states
        too_slow = {_MODEL: costs.too_slow(), **owners.too_slow()}
        agreed = check_alike(self.model.discovery, gather, ignored=self.unshared, too_slow=too_slow)
        costs.agree(agreed[_MODEL])
        owners.agree_on_costs(agreed)

    def _check_complete(self, record: Record) -> None:
        if self.refuses_incomplete and record.missing:
            raise StateError(
                'Trainer(on_incomplete="raise") demands complete checkpoints, but the one of '
                f"iteration {self.state.global_iteration} lacks {list_missing(record.missing)}. "
                "Nothing was written. Change what is named as it says there, or declare what need "
                "not be saved: unsaved = (...,)."
            )

    def capture(self) -> Record:
        """Return the whole state, by reference; all processes call this together."""
        return capture(self)

    @property
    def is_discovered(self) -> bool:
        """Whether Helios finds the model's state: it has no ``state_dict`` of its own."""
        return type(self.model).state_dict is Model.state_dict

"""What loops may access: the model, the data, the engine, the hooks, the counters and the options.

A session orders no events, which is the job of the loops, and opens no files: snapshots go to its
``Recorder``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from helios.protocols import GradientAudit, Recorder
from helios.replicas.replicas import Replicas
from helios.replicas.turns import Turns, make_turns
from helios.requests import Agreement, Requests, make_agreement
from helios.run_state.consistency import check_alike
from helios.run_state.replica_watch import ReplicaWatch
from helios.schedule import Schedule
from helios.state import Cursor, Phase, TrainingState
from helios.terminal.progress import Display

_LOGGER = logging.getLogger(__name__)


def _do_nothing() -> None:
    return


# Engine methods that run after the gradients are computed.
_UPDATE = (
    *("average_gradients", "unscale_gradients", "clip_gradients", "optimizer_step"),
    *("zero_grad", "close_window"),
)


@dataclass
class Session:
    """One call of fit, validate, test or predict, as its loops see it.

    Attributes:
        model: the user's model.
        engine: the engine.
        hooks: the receivers of each event.
        display: the progress bars.
        seed: the run's seed; evaluations always use it.
        training_seed: seed of the training steps; ``None`` for that of the run.
        schedule: the options that decide when something happens.
        sources: the data of each phase that has any, one source per loader.
        plugins: by id, in order of registration.
        schedulers: the learning-rate schedulers; ``None`` outside fit.
        recorder: receives checkpoints and scalars; ``None`` outside fit.
        can_save: whether checkpoints are written at all.
        trial_steps: batches of the sanity check, as set by ``Trainer(sanity_steps=...)``.
        loop_states: states of the loops, by role path.
        owner_states: plain attributes of plugins, data module, loops and engine.
        missing: state that no checkpoint holds, known before training: path and reason.
        claims: components that the reproducibility level takes at their word.
        refuses_incomplete: whether a checkpoint that lacks state is an error.
        note_last_safe_point: called before the save at a safe point that no batch follows.
        outside: returns why the run is to be interrupted, if the reason came from outside.
        state: the counters that users see.
        cursor: position of the next batch.
        phase: what the session is doing.
        is_resumed: whether training continues from a checkpoint.
        is_manual: whether the model steps its optimizers itself; known after the first step.
        replicas: the replicas of the run, and which process runs which.
        leaves_batches: whether the model leaves batches on the device where they are.
        is_plain: whether steps run without a context of the engine.
        agreement: what this process requests, and what all processes know.
        turns: the replica whose random numbers and buffers are in place.
        obstacles: findings in training that bind the run to its number of processes.
        unshared: paths of what each replica changes in the model on its own.
        mismatches: what audits have found.
        audit: computes gradients a second time; ``None`` without audits.
        is_repeating: whether a step is computed a second time, which must leave no trace.
        saved_randomness: the generators of the checkpoint, until training continues.
        saved_length: samples in the checkpoint's epoch; ``None`` if unknown.
        allows_other_length: whether the epoch may have another number of samples.
        is_sanity_check: whether a sanity check runs, which must have no side effects.
        num_skipped_batches: batches of the epoch before the cursor that were skipped.
        plugin_states: states of the plugins, by id.
        context: what hooks may see of the run.
    """

    model: Model
    engine: Engine
    hooks: Bus
    display: Display
    seed: int
    training_seed: int | None = None
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
    num_skipped_batches: int = 0
    context: Context = field(init=False)
    plugin_states: PluginStates = field(init=False)
    replicas: Replicas = field(init=False)
    leaves_batches: bool = field(init=False)
    is_plain: bool = field(init=False)
    agreement: Agreement = field(init=False)
    turns: Turns = field(init=False)
    obstacles: list[str] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    audit: GradientAudit | None = None
    is_repeating: bool = False
    _is_logging: bool = False

    def __post_init__(self) -> None:
        # Needed in every iteration, and constant during a run.
        self.replicas = self.engine.replicas
        is_there = self.engine.device.type == "cpu"
        self.leaves_batches = is_there and type(self.model).batch_to_device is Model.batch_to_device
        has_own = redefines(self.engine, Engine, "autocast")
        self.is_plain = not self.engine.precision.casts and not has_own
        self.context = Context(self)
        # Only a training run reports plugins of the checkpoint that are missing.
        self.plugin_states = PluginStates(self.plugins, carries=self.recorder is not None)
        self.agreement = make_agreement(self.replicas, self._look_around, self.context.take_skip)
        watch = ReplicaWatch(self, self.replicas.gather_objects)
        seed = self.seed if self.training_seed is None else self.training_seed
        self.turns = make_turns(self.replicas, seed, self.model, watch, self.agreement)

    @property
    def requests(self) -> Requests:
        """The requests made in this process."""
        return self.agreement.asked

    @property
    def agreed(self) -> Requests:
        """The requests of any process, as far as all processes know them."""
        return self.agreement.agreed

    def add_obstacle(self, text: str) -> bool:
        """Record what binds the run to its number of processes; returns whether it is new."""
        is_new = text not in self.obstacles
        if is_new:
            self.obstacles.append(text)
        return is_new

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
    def sanity_steps(self) -> int:
        """Number of batches of the sanity check, as set by the trainer or a plugin."""
        return max(self.trial_steps, *(each.sanity_steps for each in self.plugins.values()), 0)

    @property
    def trial_length(self) -> int | None:
        """Maximum number of batches per loader during a sanity check, else ``None``."""
        return self.sanity_steps if self.is_sanity_check else None

    @contextmanager
    def entering(self, phase: Phase, pass_number: int) -> Iterator[None]:
        """Run an evaluation with its own random numbers; the generators are restored afterwards."""
        found = self.phase
        self.phase = phase
        try:
            with rng.stream(rng.key(self.seed, phase.value, pass_number)):
                yield
        finally:
            self.phase = found

    def restore_randomness(self) -> None:
        """Restore the generators from the checkpoint, after everything else."""
        if self.saved_randomness is not None:
            rng.load_rng_state_dict(self.saved_randomness)
            self.saved_randomness = None

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

    def _look_around(self) -> bool:
        """Check for requests from outside; returns whether a save of this process has failed."""
        reason = self.outside()
        if reason:
            self.interrupt(reason)
        return self.recorder is not None and self.recorder.has_failed

    def agree(self, *, ends_window: bool = False) -> bool:
        """Exchange requests; all processes call this at the same place.

        Requests made later wait until the next call, in all processes.

        Args:
            ends_window: whether an accumulation window ends here: what was exchanged before its
                gradients is not exchanged again, unless a request may have been made since.

        Returns:
            Whether anything is requested.

        Raises:
            Exception: in all processes, the error of a save that has failed since the last call.
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
        """Log numbers by name, for the current iteration; reads tensors from their device."""
        is_written = self.recorder is not None and self.recorder.logs_scalars
        is_wanted = is_written or "on_log" in self.hooks.active
        if self.is_sanity_check or self.is_repeating or not is_wanted or not scalars:
            return
        if self._is_logging:
            raise UsageError(
                "Context.log(...) must not be called in on_log, because it calls on_log itself and "
                "would never return. Log in another event."
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
        """Log the losses of the current batch."""
        self.log({f"train/{name}": loss for name, loss in self.model.loss_items.items()})

    def log_scores(self) -> None:
        """Log the validation scores that are single numbers."""
        self.log({f"valid/{name}": score for name, score in as_numbers(self.model.metrics).items()})

    def save(self) -> None:
        """Write a checkpoint of this safe point, if the run saves and it is not written yet."""
        # If a poll after the save ends the run, the checkpoint exists already.
        if not self.can_save or self.recorder is None or self.recorder.has_saved(self.state):
            return
        self.check_alike()
        if self.is_leaving:
            self.note_last_safe_point()
        record = self.capture()
        self._check_complete(record)
        snapshot = record.snapshot()
        self.hooks.emit("on_save_checkpoint", snapshot)
        self.recorder.save(snapshot)

    def begin_training(self) -> None:
        """Mark the end of the start events: each start sets up again what they set up."""
        if any(redefines(self.engine, Engine, name) for name in _UPDATE):
            self.agreement.doubt()
        self.agreement.begin(self.hooks.asking)
        if self.can_save:
            self.model.discovery.begin_training()
            self.owner_states.begin_training()

    def check_alike(self) -> None:
        """Check that all processes have the same weights; raises ``UsageError`` if they differ."""
        self.replicas.compare(partial(check_alike, self.model.discovery, ignored=self.unshared))

    def _check_complete(self, record: Record) -> None:
        if self.refuses_incomplete and record.missing:
            raise StateError(
                'Trainer(on_incomplete="raise") requires complete checkpoints, but the one of '
                f"iteration {self.state.global_iteration} lacks {list_missing(record.missing)}. "
                "Nothing was written. Change what is named, or declare what need not be saved: "
                "unsaved = (...,)."
            )

    def capture(self) -> Record:
        """Return the whole state, by reference; all processes call this together."""
        return capture(self)

    @property
    def is_discovered(self) -> bool:
        """Whether Helios finds the model's state: it has no ``state_dict`` of its own."""
        return type(self.model).state_dict is Model.state_dict

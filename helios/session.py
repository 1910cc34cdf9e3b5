"""What a loop may see: the model, the data, the engine, the hooks, the counters and the options.

A session holds no order of things (loops do) and opens no file: snapshots go out through the
``Recorder`` that the house hands in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from helios import schedule as due
from helios.core import logging as log
from helios.core import rng
from helios.core.progress import Display
from helios.core.scalars import as_number, as_numbers
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.hooks.bus import Bus, naming
from helios.hooks.context import Context
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.model.trace import Trace
from helios.plugins.plugin import Plugin
from helios.schedule import Schedule
from helios.state import Cursor, Phase, TrainingState

_LOGGER = logging.getLogger(__name__)


def _as_plain(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without graphs and tensor subclasses: only its numbers are state."""
    return {
        name: value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
        for name, value in table.items()
    }


def _state_of(plugin: Plugin) -> dict[str, Any]:
    with naming(plugin, "state_dict"):
        return plugin.state_dict()


class Recorder(Protocol):
    """Where a session's results go: checkpoints and scalars."""

    def save(self, snapshot: dict[str, Any]) -> None:
        """Write a snapshot as a checkpoint; one that is committed is not written again."""
        ...

    def has_saved(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this iteration is committed."""
        ...

    @property
    def logs_scalars(self) -> bool:
        """Whether scalars are written anywhere."""
        ...

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write numbers of an iteration, by name."""
        ...


@dataclass
class Requests:
    """What was asked for and waits for the next safe point (DESIGN R4)."""

    is_checkpoint_wanted: bool = False
    stop_reason: str = ""
    interruption: str = ""


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
        sources: the data of each phase, one source for each loader; a phase without data is
            missing.
        plugins: by id, in order of registration.
        schedulers: the learning-rate schedulers; ``None`` outside of fit.
        recorder: where checkpoints and scalars go; ``None`` outside of fit.
        can_save: whether checkpoints are written at all.
        loop_states: gives the state of the loops, by role path.
        state: the counters that users see.
        cursor: where the next batch lies.
        phase: what the session is doing.
        is_resumed: whether the training goes on from a checkpoint.
        is_manual: whether the model steps its optimizers itself; known after the first step.
        carried_plugins: states of plugins that are gone, by id; saved again, unread.
        carried_loops: states of loops that are gone, by role path; saved again, unread.
        train_keys: the keys of the iterations.
        saved_randomness: the generators of the checkpoint, until the training goes on.
        is_sanity_check: whether a trial validation runs, which must leave no trace (C17).
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
    loop_states: Callable[[], dict[str, Any]] = dict
    state: TrainingState = field(default_factory=TrainingState)
    cursor: Cursor = field(default_factory=Cursor)
    requests: Requests = field(default_factory=Requests)
    phase: Phase = Phase.TRAINING
    is_resumed: bool = False
    is_manual: bool | None = None
    carried_plugins: dict[str, Any] = field(default_factory=dict)
    carried_loops: dict[str, Any] = field(default_factory=dict)
    saved_randomness: dict[str, Any] | None = None
    is_sanity_check: bool = False
    context: Context = field(init=False)
    train_keys: rng.KeySeries = field(init=False)
    _is_logging: bool = False

    def __post_init__(self) -> None:
        self.context = Context(self)
        self.train_keys = rng.KeySeries(self.seed, "train", suffix=(0,))

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

    def find_loader(self) -> Any:
        """Return the loader of the present phase; the first one of several, ``None`` for none."""
        sources = self.sources.get(self.phase)
        return sources[0].loader if sources else None

    def indices_of(self, place: Cursor) -> list[Any] | None:
        """Return the indices of the samples of a training batch; ``None`` if nobody knows them."""
        return self.training_source.indices(place.epoch, batch=place.batch, sample=place.sample)

    def move_batch(self, batch: Any, phase: Phase) -> Any:
        """Return a batch on the device, by the model's rule."""
        is_there = self.engine.device.type == "cpu"
        if is_there and type(self.model).batch_to_device is Model.batch_to_device:
            return batch
        return self.model.batch_to_device(batch, phase)

    @property
    def sanity_steps(self) -> int:
        """Batches of the trial validation that plugins ask for (C17)."""
        return max((plugin.sanity_steps for plugin in self.plugins.values()), default=0)

    @property
    def trial_length(self) -> int | None:
        """The most batches of each loader while a trial validation runs, else ``None``."""
        return self.sanity_steps if self.is_sanity_check else None

    @contextmanager
    def trying(self, *others: object) -> Iterator[None]:
        """Run a trial validation; what it has changed is put back (K14).

        After an error nothing is put back: the run ends before the training begins.

        Args:
            others: what it may change besides the model, plugins, engine and loaders.
        """
        sources = self.sources[Phase.VALIDATION]
        with rng.stream(rng.key(self.seed, "sanity")):
            self.hooks.emit("on_sanity_check_start")
            requests = replace(self.requests)
            loaders = [source.loader for source in sources]
            trace = Trace([self.model, self.engine, *self.plugins.values(), *loaders, *others])
            self.is_sanity_check = True
            try:
                with log.muted_tensorboard():
                    yield
            finally:
                self.is_sanity_check = False
            # Workers that live from pass to pass end here, and not when they are collected.
            for source in sources:
                source.close()
            trace.erase()
            self.requests = requests
            self.hooks.emit("on_sanity_check_end")

    def seed_iteration(self) -> None:
        """Set the random numbers of the present iteration (DESIGN R2)."""
        rng.reseed(self.train_keys.at(self.state.global_iteration))

    def seed_evaluation(self, pass_number: int, step: int, loader: int = 0) -> None:
        """Set the random numbers of one batch of an evaluation.

        Args:
            pass_number: number of the pass.
            step: number of the batch in its loader.
            loader: number of the loader.
        """
        which = (loader,) if loader else ()
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
        return bool(self.requests.stop_reason)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run breaks off at the next safe point, unfinished."""
        return bool(self.requests.interruption) and not self.is_stopping

    @property
    def is_leaving(self) -> bool:
        """Whether no batch follows the next safe point, for either reason."""
        return bool(self.requests.stop_reason or self.requests.interruption)

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint at the next safe point (DESIGN R4)."""
        self.requests.is_checkpoint_wanted = True

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the run at the next safe point; the first reason counts."""
        self.requests.stop_reason = self.requests.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """Ask for a checkpoint and an early return at the next safe point."""
        self.requests.interruption = self.requests.interruption or reason

    def poll_stop(self) -> None:
        """Ask plugins and model whether the training should stop (H32)."""
        if self.hooks.ask("should_training_stop"):
            self.request_stop("should_training_stop said yes")

    @property
    def limit(self) -> str:
        """Why the options end the run here; empty while they do not."""
        if due.is_out_of_patience(self.schedule, self.state):
            return f"no improvement in {self.state.early_stop_count} validations"
        if due.is_total_reached(self.schedule, self.state, self.cursor):
            return "total_steps reached"
        return ""

    def check_limits(self) -> None:
        """Ask for the end of the run where the options say so."""
        if self.limit:
            self.request_stop(self.limit)

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Log numbers by name, as of the present iteration; reads tensors from their device."""
        is_written = self.recorder is not None and self.recorder.logs_scalars
        is_wanted = is_written or self.hooks.is_heard("on_log")
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

    def move_epoch_schedulers(self) -> None:
        """Move the schedulers that count epochs, in automatic mode."""
        if self.schedulers is not None and not self.is_manual:
            self.schedulers.after_epoch()

    def conclude_validation(self) -> None:
        """Count a validation, move what follows its metrics, and ask for an improvement (H30)."""
        if self.schedulers is not None and not self.is_manual:
            self.schedulers.after_validation(self.model.metrics)
        self.log_scores()
        self.state.end_validation()
        self.state.record_improvement(has_improved=bool(self.model.have_metrics_improved()))

    def warn_of_automatic_options(self) -> None:
        """Say which options have no effect because the model steps its optimizers itself."""
        ignored = self.engine.automatic_options
        if self.schedulers is not None and self.schedulers.has_intervals_but_step:
            ignored = [*ignored, "Model.scheduler_interval"]
        if ignored:
            _LOGGER.warning(
                "%s has no effect: train_step returns None, so the model clips and steps itself. "
                "Return the loss to let Helios do it.",
                " and ".join(ignored),
            )

    def save_if_asked(self, *, is_due: bool) -> None:
        """The safe point: write a checkpoint if one is due, requested or final (DESIGN R4)."""
        if self.is_stopping and not self.limit:
            self.cursor.stop(self.requests.stop_reason)
        is_wanted = is_due or self.requests.is_checkpoint_wanted or self.is_leaving
        self.requests.is_checkpoint_wanted = False
        if not is_wanted or not self.can_save or self.recorder is None:
            return
        # Where a poll behind the save ends the run, the checkpoint is there already.
        if not self.recorder.has_saved(self.state):
            snapshot = self.snapshot()
            self.hooks.emit("on_save_checkpoint", snapshot)
            self.recorder.save(snapshot)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state, by reference: plain dictionaries of tensors, numbers, strings."""
        source = self.training_source
        return {
            "training_state": self.state.dict(),
            "cursor": self.cursor.dict(),
            "model": self.model.state_dict(),
            "tables": {name: _as_plain(table) for name, table in self.model.tables.items()},
            "is_manual": self.is_manual,
            "plugins": self.carried_plugins
            | {name: _state_of(plugin) for name, plugin in self.plugins.items()},
            "loops": self.carried_loops | self.loop_states(),
            "data": {"description": source.description, "state": source.state_dict()},
            "engine": self.engine.state_dict(),
            "rng": rng.get_rng_state_dict(),
            "num_threads": torch.get_num_threads(),
            "num_replicas": 1,
        }

"""What loops may access: the model, the data, the engine, the hooks, the counters and the options.

A session orders no events, which is the job of the loops, and opens no files: what it captures goes
to its ``CheckpointWriter``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.optim import Optimizer

from helios.best import Validation
from helios.checkpoint.capture import capture
from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.checkpoint.record import Record
from helios.core import rng
from helios.core.loss_means import LossMeans, Viewer, as_numbers
from helios.counters import Phase
from helios.engines.engine import Engine, redefines
from helios.findings import FindingKind
from helios.hooks.context import Context
from helios.hooks.events import EVENTS, Receiver
from helios.hooks.live_run import LiveRun
from helios.hooks.overrides import check_overrides, check_state_methods
from helios.listeners import (
    Iteration,
    IterationListener,
    Listeners,
    RunListener,
    Validated,
)
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.plugin import Plugin, PluginStates
from helios.replicas.turns import make_turns
from helios.requests import make_agreement
from helios.state.steps import ReplicaWatch, check_alike
from helios.terminal.progress import Display
from helios.text import with_step

if TYPE_CHECKING:
    from helios.loops.idle_watch import IdleWatch

_LOGGER = logging.getLogger(__name__)


def _do_nothing() -> None:
    return


_OF_ENGINES = [event.name for event in EVENTS.values() if Receiver.ENGINE in event.receivers]


def _accept(_: object) -> None:
    return


# Engine methods that run after the gradients are computed.
_UPDATE = (
    *("average_gradients", "unscale_gradients", "clip_gradients", "optimizer_step"),
    *("zero_grad", "close_window"),
)


class Place(Enum):
    """Where a process is, in words and in the order of an iteration."""

    STARTING = "starting"
    STEP = "in train_step"
    BACKWARD = "in backward, which exchanges gradients"
    UPDATE = "exchanging gradients"
    BOUNDARY = "ending the step"
    EVALUATION = "in an evaluation"
    AFTER_EVALUATION = "ending the evaluation"
    SAVE = "saving"
    NEXT_BATCH = "reading the next batch"


@dataclass(kw_only=True)
class Session(LiveRun):
    """One call of fit, validate, test or predict, as its loops see it.

    What it has besides the live run is for loops only.

    Attributes:
        display: the progress bars.
        seed: the run's seed.
        plugins: by id, in order of registration.
        schedulers: the learning-rate schedulers; ``None`` outside fit.
        writer: writes checkpoints; ``None`` outside fit.
        recorders: what listens to the iterations, besides means of losses, logs and display.
        run_listeners: what listens to the run.
        listeners: all that listens to the iterations.
        rates: the learning rates that the steps of this iteration have used, before schedulers.
        sanity_steps: batches of the sanity check, as set by ``Trainer(sanity_steps=...)``.
        check_record: refuses a record that must not be saved, before hooks see it.
        note_last_safe_point: called before the save at a safe point that no batch follows.
        check_data: compares the data with that of the checkpoint; takes whether the hook that
            begins an epoch still follows.
        outside: returns why the run is to be interrupted, if the reason came from outside.
        leaves_batches: whether the model leaves batches on the device where they are.
        is_plain: whether steps run without a context of the engine.
        idle_watch: notices that nothing is learned; ``None`` once something is.
        nonfinite: the first loss of this start that was not finite; empty if all were.
        beside: replicas, and the numbers that their steps have returned beside the loss in this
            iteration.
        num_evaluated: batches of evaluations so far.
        num_read_again: steps of replays of the data so far.
        place: where this process is, in the order of an iteration.
        saved_length: samples in the checkpoint's epoch; ``None`` if unknown.
        allows_other_length: whether the epoch may have another number of samples.
        context: what hooks may see of the run.
    """

    display: Display
    seed: int
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    schedulers: Schedulers | None = None
    writer: CheckpointWriter | None = None
    recorders: Sequence[IterationListener] = ()
    run_listeners: Sequence[RunListener] = ()
    listeners: Listeners = field(init=False)
    rates: dict[Optimizer, list[Any]] = field(default_factory=dict)
    sanity_steps: int = 0
    check_record: Callable[[Record], None] = _accept
    note_last_safe_point: Callable[[], None] = _do_nothing
    check_data: Callable[[bool], None] = _accept
    outside: Callable[[], str] = str
    num_evaluated: int = 0
    num_read_again: int = 0
    place: Place = Place.STARTING
    saved_length: int | None = None
    allows_other_length: bool = False
    context: Context = field(init=False)
    leaves_batches: bool = field(init=False)
    is_plain: bool = field(init=False)
    idle_watch: IdleWatch | None = None
    nonfinite: str = ""
    beside: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Needed in every iteration, and constant during a run.
        self.replicas = self.engine.replicas
        self.gradients = self.engine._gradients
        if type(self.engine) is not Engine:
            check_overrides(self.engine, Engine, receives=_OF_ENGINES)
            check_state_methods(self.engine, Engine)
        is_there = self.engine.device.type == "cpu"
        self.leaves_batches = is_there and type(self.model).batch_to_device is Model.batch_to_device
        has_own = redefines(self.engine, Engine, "autocast")
        self.is_plain = not self.engine.precision.casts and not has_own
        self.is_discovered = type(self.model).state_dict is Model.state_dict
        self.context = Context(self)
        self.loss_means = LossMeans(self._warn_of_nonfinite)
        logs = (_LossLog(self),) if self.schedule.logs else ()
        self.listeners = Listeners((self.loss_means, *logs, self.display, *self.recorders))
        # Only a training run reports plugins of the checkpoint that are missing.
        self.plugin_states = PluginStates(self.plugins, carries=self.writer is not None)
        self.agreement = make_agreement(self.replicas, self._look_around, self.pop_skip_reason)
        watch = ReplicaWatch(
            type(self.model).__name__,
            self.model.discovery,
            self.owner_states,
            findings=self.findings,
            gather=self.replicas.gather_objects,
        )
        self.turns = make_turns(
            self.replicas,
            self.seed,
            model=self.model,
            gradients=self.gradients,
            watch=watch,
            agreement=self.agreement,
        )

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
            rng.load_states(self.saved_randomness)
            self.saved_randomness = None

    def _look_around(self) -> bool:
        """Check for requests from outside; returns whether a save of this process has failed."""
        reason = self.outside()
        if reason:
            self.context.interrupt(reason)
        return self.writer is not None and self.writer.has_failed

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
        if is_alarm and self.writer is not None:
            self.writer.raise_failure()
        agreed = self.agreement.agreed
        return bool(agreed.stop_reason or agreed.interruption or agreed.is_checkpoint_wanted)

    def stop(self, reason: str) -> None:
        """End the run at the next safe point, for a reason that all processes know."""
        for requests in (self.agreement.asked, self.agreement.agreed):
            requests.stop_reason = requests.stop_reason or reason

    def keep_beside(self, results: Sequence[Any]) -> None:
        """Keep the numbers that a step has returned beside its losses, until the next iteration."""
        if self.turns.is_first and self.beside:
            self.beside = []
        numbers = None
        for result in results:
            if isinstance(result, dict):
                numbers = result if numbers is None else numbers | result
        if numbers is not None:
            shown = {
                str(name): part.detach() if isinstance(part, Tensor) else part
                for name, part in numbers.items()
                if name != "loss" and _is_number(part)
            }
            self.beside.append((self.turns.replica, shown))

    def serve_losses(self) -> None:
        """Begin to add up losses for those who see their means in this run."""
        schedule = self.schedule
        self.loss_means.serve(
            (
                *((Viewer.FILES,) if schedule.logs else ()),
                *((Viewer.VALIDATION,) if schedule.valid_frequency is not None else ()),
                *self.display.viewers,
            )
        )

    def notify_evaluated(self, label: str, number: int, total: int | None) -> None:
        """Notify listeners of the batches of an evaluation that are done.

        Args:
            label: what it is.
            number: the batches so far.
            total: all of them, if known.
        """
        for notify in self.listeners.evaluated:
            notify(label, number, total)

    def notify_paused(self) -> None:
        """Notify listeners that no iteration has used the time since the last one."""
        for notify in self.listeners.paused:
            notify()

    def log_losses(self) -> dict[str, float]:
        """Log the mean losses, over all replicas, since they were logged last; returns them."""
        means = self.loss_means.pop_means(Viewer.FILES, self.replicas.gather_objects)
        items = self.model.loss_items
        # What is no number cannot be logged, and says so.
        others = {name: item for name, item in items.items() if name not in means}
        self.context.log({f"train/{name}": loss for name, loss in (means | others).items()})
        return means

    def _warn_of_nonfinite(self, name: str, value: float, first: int) -> None:
        """Warn of the first loss that is not finite, and note it for the summary.

        Args:
            name: its name.
            value: its value, or the sum of which it is a part.
            first: the first iteration that it may be from; the last one is the current one.
        """
        if self.nonfinite:
            return
        state = self.state
        iteration = with_step(state.global_iteration, state.global_step)
        place = f"epoch {state.global_epoch}, iteration {iteration}"
        if first < state.global_iteration:
            place = f"{place} or earlier, after iteration {first - 1}"
        self.nonfinite = f"{name} was {value} ({place})"
        _LOGGER.warning(
            "%s is %s in %s, and no warning follows for later ones. The plugin NaNGuard names the "
            "samples, and keeps such losses from the weights.",
            name,
            value,
            place,
        )

    def log_scores(self) -> None:
        """Log the validation scores that are single numbers."""
        self.context.log(
            {f"valid/{name}": score for name, score in as_numbers(self.model.metrics).items()}
        )

    def judge_scores(self) -> bool:
        """Judge the validation that has ended, whether it is one of the best, and log its scores.

        The scores of rank 0 decide in all processes. One of the best is saved at the safe point of
        the same boundary, if the rule says so.

        Returns:
            Whether ``have_metrics_improved`` returned True in any process.
        """
        own = bool(self.model.have_metrics_improved()), as_numbers(self.model.metrics)
        judgements = self.replicas.gather_objects(own)
        has_improved = any(improved for improved, _ in judgements)
        losses = self.loss_means.pop_means(Viewer.VALIDATION, self.replicas.gather_objects)
        state = self.state
        validation = Validation(state.global_iteration, judgements[0][1], state.global_step)
        is_among = self.best.judge(validation, has_improved=has_improved)
        if is_among and self.best.rule is not None and self.best.rule.saves:
            self.agreement.agreed.is_checkpoint_wanted = True
        # A hook may have replaced a sum by a score of its own.
        table, summed = self.model.metrics, self.summed_scores.items()
        by_hand = validation.scores.keys() - {n for n, score in summed if table.get(n) is score}
        validated = Validated(
            validation.scores,
            state,
            has_improved=has_improved,
            best=self.best.best,
            by_hand=by_hand,
            losses=losses,
        )
        for listener in self.run_listeners:
            listener.validated(validated)
        return has_improved

    def save(self) -> None:
        """Write a checkpoint of this safe point, if the run saves and it is not written yet."""
        # If a poll after the save ends the run, the checkpoint exists already.
        if not self.can_save or self.writer is None or self.writer.has(self.state):
            return
        self.place = Place.SAVE
        self.loss_means.report_nonfinite()
        self.refuse_idle_steps()
        self.check_alike()
        if self.is_leaving:
            self.note_last_safe_point()
        record = self.capture()
        self.check_record(record)
        snapshot = record.snapshot()
        self.hooks.emit("on_save_checkpoint", snapshot)
        self.writer.save(snapshot)

    def refuse_idle_steps(self, *, at: int = 0) -> None:
        """Raise ``UsageError`` if nothing was learned so far, before a save or after an epoch.

        Args:
            at: the iteration to look in at the earliest.
        """
        if self.is_manual is False:
            self.idle_watch = None
        if self.idle_watch is not None and self.state.global_iteration >= at:
            self.idle_watch.refuse(self.state.global_iteration)
            self.idle_watch = None

    def begin_training(self) -> None:
        """Mark the end of the start events: each start sets up again what they set up."""
        if any(redefines(self.engine, Engine, name) for name in _UPDATE):
            self.agreement.expect_late_requests()
        self.agreement.begin(self.hooks.asking)
        if self.can_save:
            self.model.discovery.begin_training()
            self.owner_states.begin_training()

    def check_alike(self) -> None:
        """Check that all processes have the same weights; raises ``UsageError`` if they differ."""
        ignored = self.findings.names(FindingKind.UNSHARED)
        self.replicas.compare(partial(check_alike, self.model.discovery, ignored=ignored))

    def capture(self) -> Record:
        """Return the whole state, by reference; all processes call this together."""
        return capture(self)


@final
class _LossLog(IterationListener):
    """Logs the mean losses where that is due.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def iteration_ended(self, iteration: Iteration) -> None:
        """Log them."""
        iteration.logged = self._session.log_losses() if iteration.logs else None


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)

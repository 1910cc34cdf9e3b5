"""``EpochLoop``: one epoch, from the cursor to its end; ``Boundary`` decides what follows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, final

import helios.schedule as due
from helios.core.utils import AverageTimer
from helios.data.source import BatchIterator, NoBatches
from helios.errors import UsageError
from helios.findings import FindingKind
from helios.listeners import Iteration, Listeners
from helios.loops.batch import BatchLoop
from helios.loops.boundary import CUT, EPOCH, STEP, WINDOW, Boundary
from helios.loops.evaluation import ValidationLoop
from helios.loops.loop import Loop, make_stray_stop, require
from helios.session import Place, Session

_LOGGER = logging.getLogger(__name__)
_NONE = NoBatches("EpochLoop.batches")
_END = object()
_IDLE_BATCHES = 100


class EpochLoop(Loop):
    """The default epoch loop."""

    _internals: ClassVar[str] = (
        "_batches _boundary _counted _has_left _is_complete _is_over _iteration _kind _listeners "
        "_must_open _num_done _timer batch_loop val_loop"
    )

    roles = ("batch_loop", "val_loop")
    _role_types: ClassVar = {"batch_loop": BatchLoop, "val_loop": ValidationLoop}
    _role_arguments: ClassVar = {"batch_loop": ("batch",)}

    if TYPE_CHECKING:

        def connect(  # type: ignore[override]
            self, *, batch_loop: Loop = ..., val_loop: Loop = ...
        ) -> None: ...

    def __init__(self, batch_loop: Loop | None = None, val_loop: Loop | None = None) -> None:
        super().__init__()
        self.batch_loop: BatchLoop = batch_loop  # type: ignore[assignment] # until attached
        self.val_loop: ValidationLoop = val_loop  # type: ignore[assignment]
        self._batches: BatchIterator = _NONE
        self._must_open = False
        self._kind = STEP
        self._timer = AverageTimer()
        self._listeners = Listeners()
        self._is_over = False
        self._is_complete = False
        self._has_left = False
        self._num_done = 0
        self._counted: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the epoch is complete, or the run ends at this boundary."""
        return self._is_over

    @property
    def batches(self) -> BatchIterator:
        """The epoch's iterations from the cursor on: lists of one batch for each replica here.

        A new epoch has them after ``on_training_epoch_start``: read them in ``on_run_start``, after
        that of the base, or in ``advance``. Before, and outside a run, the first access raises
        ``UsageError``.
        """
        return self._batches

    @property
    def has_left(self) -> bool:  # type: ignore[override]
        """Whether the run ends, at a safe point: the only place where it may."""
        return self._has_left

    def reset(self) -> None:
        """Prepare the epoch; open its data at the cursor if no hook precedes the first batch."""
        session = self._session
        self._is_over = self._has_left = self._is_complete = False
        self._num_done = 0
        self._boundary = Boundary(session)
        self._kind = WINDOW if session.schedule.is_by_epoch else STEP
        self._listeners = session.listeners
        self._iteration = Iteration(session.state, session.loss_means)
        self._must_open = True
        session.num_skipped_batches = 0
        if session.is_in_epoch:
            self._open()

    def _open(self) -> None:
        """Open the data at the cursor, without replaying or skipping batches.

        Workers start here, with a copy of the data set: what a hook changes in it later does not
        reach them.
        """
        self._must_open = False
        session, cursor, listeners = self._session, self._session.cursor, self._listeners
        source = session.training_source
        total, done = source.measure(cursor.epoch, batch=cursor.batch, sample=cursor.sample)
        if not source.ends_together:
            total = None
        self._is_complete = total == done
        session.num_skipped_batches = cursor.batch - done
        self._batches = source.batches(
            cursor.epoch,
            batch=cursor.batch,
            sample=cursor.sample,
            reads_content=bool(listeners.batches_fetched),
        )
        self._catch_up()
        if not source.ends_together:
            self._batches = EvenBatches(self._batches, session)
        session.training_batches = self._batches
        session.turns.begin_epoch()
        for notify in listeners.epoch_opened:
            notify(cursor.epoch, total, cursor.step)
        self._timer.start()

    def _catch_up(self) -> None:
        """Read again what comes before the cursor, with a bar, if the data cannot start there."""
        session, count, label = self._session, self._batches.replay_length, "reading again"
        if not count:
            return
        session.notify_evaluated(label, 0, count)
        for number, _ in enumerate(self._batches.catch_up(), 1):
            session.num_read_again += 1
            session.notify_evaluated(label, number, count)
        self._end_pause()

    def on_run_start(self) -> None:
        """Begin the epoch, or continue after the safe point of a checkpoint inside it."""
        session = self._session
        if session.is_in_epoch:
            if self._boundary.resume(self._kind):
                self._leave()
            return
        session.state.begin_epoch(session.cursor.epoch)
        session.hooks.emit("on_training_epoch_start", session.state.global_epoch)
        session.check_data(False)
        if self._must_open:
            self._open()

    def advance(self) -> None:
        """Train on the batches of one iteration."""
        session = self._session
        state, turns = session.state, session.turns
        if self._must_open:
            # A subclass has an on_run_start of its own.
            self._open()
        batches = self._batches
        session.place = Place.NEXT_BATCH
        found = next(batches)
        if batches.skipped[0]:
            self._jump(*batches.skipped)
        for notify in self._listeners.batches_fetched:
            numbers = notify(found, batches.indices, batches.contents)
            if numbers:
                turns.add_with_losses(numbers)
        opens_window = self._begin_iteration(found[0], is_last=batches.is_last)
        child = self.batch_loop or require(self.batch_loop)
        # Helios' own has one round for each batch.
        train = child.run if child._has_own_cycle else child.advance
        session.place = Place.STEP
        try:
            for replica, batch in zip(session.replicas.local_replicas, found, strict=True):
                turns.begin(replica, opens_window=opens_window)
                if not turns.is_first:
                    session.batch = session.raw_batch = batch
                turns.has_collected = False
                train(batch)
                if not turns.has_collected and not session.is_manual:
                    self._refuse_lost_turn()
                turns.end(ends_window=state.is_step_boundary)
            self._end_iteration(batches.num_samples)
        except StopIteration as error:
            raise make_stray_stop(error) from error

    def _refuse_lost_turn(self) -> None:
        """Refuse a batch loop that trains without an optimizer loop, unless it may.

        Raises:
            UsageError: if gradients must be summed over replicas or micro-batches.
        """
        session = self._session
        if session.turns.sums_gradients or session.schedule.accumulation_steps > 1:
            raise UsageError(
                f"{type(self.batch_loop).__name__} must run an OptimizerLoop on each batch, but "
                "the gradients of this one were not handed over: with several replicas or "
                "accumulation_steps they would be lost. Call self.optimizer_loop.run(batch); "
                "override OptimizerLoop.losses(batch) for a step of your own."
            )

    def _refuse_other_counts(self, counted: tuple[int, ...]) -> None:
        """Refuse counters that a hook or step has assigned.

        Raises:
            UsageError: with what differs.
        """
        names = ("global_iteration", "current_iteration", "global_epoch", "global_step")
        changed = [
            f"state.{name} from {before} to {now}"
            for name, before, now in zip(names, self._counted, counted, strict=True)
            if before != now
        ]
        raise UsageError(
            "The counters of a run must not be assigned, but a hook, a step or a loop has changed "
            f"{' and '.join(changed)}. Keep counts of your own in self; request_stop(reason) ends "
            "a run."
        )

    def _jump(self, num_batches: int, num_samples: int) -> None:
        """Move the cursor past batches that are skipped."""
        session = self._session
        session.cursor.batch += num_batches
        session.cursor.sample += num_samples
        session.num_skipped_batches += num_batches

    def on_advance_end(self) -> None:
        """Poll for a stop; at a boundary, do what is due there."""
        session, state = self._session, self._session.state
        counted = (
            state.global_iteration,
            # A skipped update has withdrawn the count of its step.
            state.current_iteration
            + (not state.is_step_committed and not session.schedule.is_by_epoch),
            state.global_epoch,
            state.global_step - (state.is_step_boundary and state.is_step_committed),
        )
        if self._counted and counted != self._counted:
            self._refuse_other_counts(counted)
        try:
            if "should_training_stop" in session.hooks.active:
                self._boundary.poll()
            self._is_complete = self._is_over = self._batches.is_last
            if not state.is_step_boundary:
                return
            if self._is_complete and self._kind is WINDOW:
                # The end of the epoch replaces its last boundary.
                session.agree(ends_window=True)
            elif self._boundary.follow(self._kind, self._validate):
                self._leave()
        except StopIteration as error:
            raise make_stray_stop(error) from error

    def _leave(self) -> None:
        self._has_left = self._is_over = True

    def on_run_end(self) -> None:
        """End the epoch; in EPOCH unit its end is a boundary."""
        session = self._session
        if self._is_complete:
            self._name_unused()
        self._close_batches()
        self._refuse_empty_epoch()
        if not self._is_over and not self._is_complete:
            self._end_cut_epoch()
        if self._is_left_unfinished:
            return
        self._warn_of_lost_steps()
        is_by_epoch = session.schedule.is_by_epoch
        if self._has_left and not self._is_complete:
            if is_by_epoch:
                self._boundary.validate_if_due(self._validate)
            self._emit_end()
            return
        if session.schedulers is not None and not session.is_manual:
            session.schedulers.after_epoch()
        if is_by_epoch:
            if self._boundary.follow(EPOCH, self._validate, self._end_epoch):
                self._leave()
        else:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._emit_end()
        self._session.refuse_idle_steps()
        self._session.cursor.next_epoch()
        self._session.state.end_epoch()

    def _emit_end(self) -> None:
        session = self._session
        session.hooks.emit("on_training_epoch_end", session.state.global_epoch)
        session.agree()
        for notify in self._listeners.epoch_ended:
            notify()

    @property
    def _is_left_unfinished(self) -> bool:
        """Whether the run was interrupted at a safe point inside the epoch.

        By epochs, the end of the epoch is a safe point itself, and comes first.
        """
        is_at_its_end = self._session.schedule.is_by_epoch and self._is_complete
        return self._session.is_interrupted and self._has_left and not is_at_its_end

    def teardown(self) -> None:
        """End the workers of an epoch that an error has left open."""
        self._close_batches()
        super().teardown()

    def _refuse_empty_epoch(self) -> None:
        # Epochs without batches would run forever, or end a training without any step.
        session = self._session
        if self._num_done == 0 and session.cursor.batch == 0 and not self._has_left:
            if session.is_leaving:
                raise UsageError(
                    "The run must end at the end of an accumulation window, but a hook raises "
                    "StopIteration at the first batch of every epoch. To end a run, only call "
                    "request_stop or interrupt, and let the window be completed."
                )
            raise UsageError(
                f"Epoch {session.state.global_epoch} has no batches. Either the data is an "
                "iterator that can be read only once (let its __iter__ return a new iterator), or "
                "a hook raises StopIteration at the first batch."
            )

    def _name_unused(self) -> None:
        """Say once how many samples of longer parts of a stream an epoch leaves unused."""
        session = self._session
        own = session.training_source.count_unused()
        if own is None:
            return
        found = session.replicas.gather_objects(own)
        count, are_all = sum(number for number, _ in found), all(is_end for _, is_end in found)
        if count:
            _LOGGER.warning(
                "The parts of the Stream differ: an epoch ends with the shortest one, and epoch %d "
                "has left %s%s samples of the others unused. Divide the data into parts of equal "
                "length.",
                session.state.global_epoch,
                "" if are_all else "more than ",
                f"{count:,}",
            )

    def _warn_of_lost_steps(self) -> None:
        session = self._session
        if session.cursor.step == 0 and self._num_done and not session.state.is_step_committed:
            _LOGGER.warning(
                "Epoch %d has made no optimizer step: all were skipped. A run that counts steps "
                "never ends like this.",
                session.state.global_epoch,
            )

    def _end_cut_epoch(self) -> None:
        """Bring an epoch that a hook has ended early to a point where it may end.

        By steps, an open window continues in the next epoch, and a closed one is a safe point,
        where the run may end. By epochs, windows end with their epoch.
        """
        session, state = self._session, self._session.state
        if not session.schedule.is_by_epoch:
            is_safe = session.is_leaving and state.is_step_boundary
            if is_safe and self._boundary.follow(CUT, self._validate):
                self._leave()
        elif not state.is_step_boundary and state.global_iteration > 0:
            _LOGGER.warning(
                "Epoch %d was ended inside an accumulation window: its gradients are dropped, "
                "without an update.",
                state.global_epoch,
            )
            for optimizer in session.model.discovery.optimizers().values():
                session.engine.zero_grad(optimizer)
            session.engine.close_window()
            session.turns.drop_window()
            session.pop_skip_reason()
            session.end_window()
            state.drop_window()

    def _begin_iteration(self, batch: Any, *, is_last: bool) -> bool:
        """Count an iteration and emit its start events; returns whether it opens a window."""
        session, state, hooks = self._session, self._session.state, self._session.hooks
        found = (state.is_step_boundary, state.is_step_committed)
        is_boundary = session.schedule.accumulation_steps == 1 or due.ends_window(
            session.schedule,
            iteration=state.global_iteration + 1,
            batch=session.cursor.batch - session.num_skipped_batches,
            is_last=is_last,
            is_manual=bool(session.is_manual),
        )
        state.begin_iteration(session.schedule.unit, is_boundary=is_boundary)
        self._counted = (
            state.global_iteration,
            state.current_iteration,
            state.global_epoch,
            state.global_step,
        )
        session.engine._gradient_norm = None
        session.turns.begin_iteration(state.global_iteration)
        opens_window = found[0] or state.global_iteration == 1
        try:
            if opens_window:
                session.is_window_open = True
                if "on_training_step_start" in hooks.active:
                    hooks.emit("on_training_step_start", state)
            session.batch = session.raw_batch = batch
            if "on_training_batch_start" in hooks.active:
                hooks.emit("on_training_batch_start", state)
        except StopIteration as error:
            obstacle = session.turns.check_stop(error)
            if obstacle:
                session.findings.add(FindingKind.OBSTACLE, text=obstacle)
            # The batch was not trained on: counting it would end runs and windows too early.
            was_boundary, was_committed = found
            state.withdraw_iteration(
                session.schedule.unit, was_boundary=was_boundary, was_committed=was_committed
            )
            raise
        return opens_window

    def _end_iteration(self, num_samples: int) -> None:
        session, state, hooks = self._session, self._session.state, self._session.hooks
        if state.is_step_boundary:
            session.end_window()
        iteration, turns = self._iteration, session.turns
        # Before events that may depend on what is logged.
        if session.recorders:
            iteration.means = turns.means or {**session.model.loss_items}
        should_log = session.schedule.logs and due.is_log_due(session.schedule, state)
        if "on_training_batch_end" in hooks.active:
            session.batch = session.raw_batch
            hooks.emit("on_training_batch_end", state, should_log)
        session.end_batch()
        if state.is_step_boundary:
            if "on_training_step_end" in hooks.active:
                hooks.emit("on_training_step_end", state, state.is_step_committed)
            state.global_step += state.is_step_committed
            session.cursor.step += state.is_step_committed
        # After the last event that may change the table.
        iteration.losses = session.model.loss_items
        iteration.weighted, iteration.totals = turns.weighted, turns.totals
        iteration.beside = session.beside
        iteration.rates, session.rates = session.rates, {}
        iteration.norm = session.engine._gradient_norm
        iteration.is_last, iteration.logs = self._batches.is_last, should_log
        for notify in self._listeners.iteration_ended:
            notify(iteration)
        # A graph that a loss still has must not last into the next iteration.
        iteration.losses = iteration.means = {}
        session.cursor.batch += 1
        session.cursor.sample += num_samples
        state.dataset_iter += 1
        self._num_done += 1
        state.average_iter_time = self._timer.record()
        if session.idle_watch is not None:
            session.refuse_idle_steps(at=_IDLE_BATCHES)

    def _validate(self) -> bool:
        try:
            return bool(require(self.val_loop).run())
        except StopIteration as error:
            raise make_stray_stop(error) from error
        finally:
            self._end_pause()

    def _end_pause(self) -> None:
        """Leave out of the time of iterations what has passed since the last one."""
        self._timer.start()
        self._session.notify_paused()

    def _close_batches(self) -> None:
        self._batches.close()
        self._batches, self._must_open = _NONE, False
        # An error in setup ends the call before there is a session.
        if "_session" in vars(self):
            self._session.training_batches = None


@final
class EvenBatches(BatchIterator):
    """Ends the pass of all processes when the data of the first one ends.

    The remaining batches of the others are not used.

    Args:
        batches: those of this process.
        session: the run.
    """

    def __init__(self, batches: BatchIterator, session: Session) -> None:
        self._batches = batches
        self._session = session

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        has_ended, is_last = self._session.replicas.agree(batch is _END, self._batches.is_last)
        if has_ended:
            self.close()
            raise StopIteration
        self.num_samples, self.is_last = self._batches.num_samples, is_last
        self.indices, self.contents = self._batches.indices, self._batches.contents
        return batch

    def close(self) -> None:
        """End the pass and its workers."""
        self._batches.close()

"""``EpochLoop``: one epoch, from the cursor to its end; ``Boundary`` decides what follows.

Each iteration fetches a batch for each replica of this process, runs the ``BatchLoop`` on each, and
counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, final

import helios.schedule as due
from helios.core.utils import AverageTimer
from helios.counters import Phase
from helios.data.source import BatchIterator, WrappedBatches
from helios.errors import UsageError
from helios.findings import FindingKind
from helios.loops.boundary import CUT, EPOCH, STEP, WINDOW, Boundary
from helios.loops.evaluation import ValidationLoop
from helios.loops.loop import Loop, make_stray_stop, moves_batches
from helios.loops.optimizer import OptimizerLoop
from helios.replicas.replica_runner import SharedReplicaRunner
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.run_state import Place

_LOGGER = logging.getLogger(__name__)
_END = object()
_IDLE_BATCHES = 100


class BatchLoop(Loop):
    """The default batch loop: moves the batch of a replica to the device and trains on it."""

    _bound: ClassVar[str] = "_moves _prepares _train"
    _internals: ClassVar[str] = f"{_bound} _is_done optimizer_loop"

    roles = ("optimizer_loop",)

    def __init__(self, optimizer_loop: Loop | None = None) -> None:
        super().__init__()
        self.optimizer_loop: OptimizerLoop = optimizer_loop  # type: ignore[assignment]
        self._is_done = False

    def _bind(self, parts: RunParts) -> None:
        child = self.optimizer_loop
        # Helios' own has one round for each batch.
        self._train = child.run if child._has_own_cycle else child.advance
        self._moves = moves_batches(parts)
        is_mapped = "process_training_batch" in parts.hooks.active
        is_own = type(self).prepare is not BatchLoop.prepare
        self._prepares = self._moves or is_mapped or is_own

    @property
    def done(self) -> bool:
        """Whether the replica's batch is done."""
        return self._is_done

    def reset(self) -> None:
        """Prepare for one iteration."""
        self._is_done = False

    def advance(self, batch: Any) -> None:
        """Train on the batch of one replica."""
        self._is_done = True
        self._train(self.prepare(batch) if self._prepares else batch)

    def prepare(self, batch: Any) -> Any:
        """Return a batch on the device, as the owner of ``process_training_batch`` maps it.

        Loops that replace this one must also call it, exactly once per batch.

        Raises:
            UsageError: if it raises ``StopIteration``, which must not end a loop.
        """
        try:
            if self._moves:
                batch = self._parts.model.batch_to_device(batch, Phase.TRAINING)
            return self._parts.hooks.transform("process_training_batch", batch, self._run.state)
        except StopIteration as error:
            raise make_stray_stop(error) from error


class EpochLoop(Loop):
    """The default epoch loop."""

    _bound: ClassVar[str] = (
        "_batch_ended _batch_started _boundary _engine _iteration _iteration_ended _runner "
        "_schedule _shared _state _step_ended _step_started _train"
    )
    _internals: ClassVar[str] = (
        f"{_bound} _batches _has_left _is_complete _is_over _kind _num_done "
        "_timer batch_loop val_loop"
    )

    roles = ("batch_loop", "val_loop")

    def __init__(self, batch_loop: Loop | None = None, val_loop: Loop | None = None) -> None:
        super().__init__()
        self.batch_loop: BatchLoop = batch_loop  # type: ignore[assignment] # until attached
        self.val_loop: ValidationLoop = val_loop  # type: ignore[assignment]
        self._batches: BatchIterator | None = None
        self._kind = STEP
        self._timer = AverageTimer()
        self._is_over = False
        self._is_complete = False
        self._has_left = False
        self._num_done = 0

    def _bind(self, parts: RunParts) -> None:
        self._engine, self._schedule = parts.engine, parts.schedule
        self._runner, self._shared = parts.runner, parts.shared_runner
        self._iteration = parts.iteration
        self._iteration_ended = parts.listeners.iteration_ended
        child = self.batch_loop
        # Helios' own has one round for each batch.
        self._train = child.run if child._has_own_cycle else child.advance
        self._step_started = parts.hooks.find("on_training_step_start")
        self._batch_started = parts.hooks.find("on_training_batch_start")
        self._batch_ended = parts.hooks.find("on_training_batch_end")
        self._step_ended = parts.hooks.find("on_training_step_end")

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
        if self._batches is None:
            raise UsageError("EpochLoop.batches is not available: the epoch was not started.")
        return self._batches

    @property
    def has_left(self) -> bool:  # type: ignore[override]
        """Whether the run ends, at a safe point: the only place where it may."""
        return self._has_left

    def reset(self) -> None:
        """Prepare the epoch; open its data at the cursor if no hook precedes the first batch."""
        self._is_over = self._has_left = self._is_complete = False
        self._num_done = 0
        self._state = self._iteration.state = self._run.state
        self._boundary = Boundary(self._parts)
        self._kind = WINDOW if self._schedule.is_by_epoch else STEP
        self._run.num_skipped_batches = 0
        if self._run.is_in_epoch:
            self._open()

    def _open(self) -> BatchIterator:
        """Open the data at the cursor, without replaying or skipping batches.

        Workers start here, with a copy of the data set: what a hook changes in it later does not
        reach them.
        """
        run, cursor, listeners = self._run, self._run.cursor, self._parts.listeners
        source = self._parts.training_source
        total, done = source.measure(cursor.epoch, batch=cursor.batch, sample=cursor.sample)
        if not source.ends_together:
            total = None
        self._is_complete = total == done
        run.num_skipped_batches = cursor.batch - done
        batches = source.batches(
            cursor.epoch,
            batch=cursor.batch,
            sample=cursor.sample,
            reads_content=bool(listeners.batches_fetched),
        )
        self._batches = batches
        for _ in batches.catch_up():
            run.num_other_batches += 1
            self._end_pause()
        if not source.ends_together:
            batches = EvenBatches(batches, self._parts.replicas)
        run.batches = self._batches = batches
        if self._shared is not None:
            self._shared.begin_epoch()
        for notify in listeners.epoch_opened:
            notify(cursor.epoch, total, cursor.step)
        self._timer.start()
        return batches

    def on_run_start(self) -> None:
        """Begin the epoch, or continue after the safe point of a checkpoint inside it."""
        if self._run.is_in_epoch:
            if self._boundary.resume(self._kind):
                self._leave()
            return
        self._state.begin_epoch(self._run.cursor.epoch)
        self._parts.hooks.emit("on_training_epoch_start", self._state.global_epoch)
        self._parts.check_data()
        self._open()

    def advance(self) -> None:
        """Train on the batches of one iteration."""
        run, runner, batches = self._run, self._runner, self._batches or self._open()
        run.place = Place.NEXT_BATCH
        found = next(batches)
        if batches.skipped[0]:
            num_batches, num_samples = batches.skipped
            run.cursor.batch += num_batches
            run.cursor.sample += num_samples
            run.num_skipped_batches += num_batches
        for notify in self._parts.listeners.batches_fetched:
            numbers = notify(found, batches.indices, batches.contents)
            if numbers:
                runner.add_with_losses(numbers)
        opens_window = self._begin_iteration(found[0], is_last=batches.is_last)
        run.place = Place.STEP
        try:
            if self._shared is None:
                runner.has_collected = False
                self._train(found[0])
                if not runner.has_collected:
                    self._check_lost_step()
            else:
                self._train_replicas(self._shared, found, opens_window)
            self._end_iteration(batches)
        except StopIteration as error:
            raise make_stray_stop(error) from error

    def _train_replicas(
        self, shared: SharedReplicaRunner, batches: Sequence[Any], opens_window: bool
    ) -> None:
        """Train on the batches of the replicas of this process, one after another."""
        run = self._run
        for replica, batch in zip(self._parts.replicas.local_replicas, batches, strict=True):
            shared.begin(replica, opens_window=opens_window)
            run.batch = run.raw_batch = batch
            shared.has_collected = False
            self._train(batch)
            if not shared.has_collected:
                self._check_lost_step()
            shared.end(ends_window=self._state.is_step_boundary)

    def _check_lost_step(self) -> None:
        """Refuse a batch loop that trains without an optimizer loop, unless it may.

        Raises:
            UsageError: if gradients must be summed over replicas or micro-batches.
        """
        is_summed = self._shared is not None or self._schedule.accumulation_steps > 1
        if is_summed and not self._run.is_manual:
            raise UsageError(
                f"{type(self.batch_loop).__name__} must run an OptimizerLoop on each batch, but "
                "the gradients of this one were not collected: with several replicas or "
                "accumulation_steps they would be lost. Call self.optimizer_loop.run(batch); "
                "override OptimizerLoop.losses(batch) for your own step."
            )

    def on_advance_end(self) -> None:
        """Poll for a stop; at a boundary, do what is due there."""
        state = self._state
        try:
            if "should_training_stop" in self._parts.hooks.active:
                self._boundary.poll()
            self._is_over = self._is_complete
            if not state.is_step_boundary:
                return
            if self._is_complete and self._kind is WINDOW:
                # The end of the epoch replaces its last boundary.
                self._parts.agreement.settle(ends_window=True)
            elif self._boundary.follow(self._kind, self._validate):
                self._leave()
        except StopIteration as error:
            raise make_stray_stop(error) from error

    def _leave(self) -> None:
        self._has_left = self._is_over = True

    def on_run_end(self) -> None:
        """End the epoch; in EPOCH unit its end is a boundary."""
        self._close_batches()
        self._refuse_empty_epoch()
        if not self._is_over and not self._is_complete:
            self._end_cut_epoch()
        if self._is_left_unfinished:
            return
        self._warn_of_lost_steps()
        is_by_epoch, schedulers = self._schedule.is_by_epoch, self._parts.schedulers
        if self._has_left and not self._is_complete:
            if is_by_epoch:
                self._boundary.validate_if_due(self._validate)
            self._emit_end()
            return
        if schedulers is not None and not self._run.is_manual:
            schedulers.after_epoch()
        if is_by_epoch:
            if self._boundary.follow(EPOCH, self._validate, self._end_epoch):
                self._leave()
        else:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._emit_end()
        self._check_learning()
        self._run.cursor.next_epoch()
        self._state.end_epoch()

    def _emit_end(self) -> None:
        self._parts.hooks.emit("on_training_epoch_end", self._state.global_epoch)
        self._parts.agreement.settle()
        for notify in self._parts.listeners.epoch_ended:
            notify()

    def _check_learning(self) -> None:
        """Refuse a new run that has learned nothing so far."""
        iteration = self._state.global_iteration
        self._parts.idle_watch.conclude(iteration, is_manual=self._run.is_manual)

    @property
    def _is_left_unfinished(self) -> bool:
        """Whether the run was interrupted at a safe point inside the epoch.

        By epochs, the end of the epoch is a safe point itself, and comes first.
        """
        is_at_its_end = self._schedule.is_by_epoch and self._is_complete
        return self._run.is_interrupted and self._has_left and not is_at_its_end

    def teardown(self) -> None:
        """End the workers of an epoch that an error has left open."""
        self._close_batches()
        super().teardown()

    def _refuse_empty_epoch(self) -> None:
        # Epochs without batches would run forever, or end a run without any step.
        run = self._run
        if self._num_done == 0 and run.cursor.batch == 0 and not self._has_left:
            raise UsageError(
                f"Epoch {run.state.global_epoch} has no batches. Either the data is an "
                "iterator that can be read only once (let its __iter__ return a new iterator), or "
                "a hook raises StopIteration at the first batch. To end a run, only call "
                "request_stop or interrupt, and let the window be completed."
            )

    def _warn_of_lost_steps(self) -> None:
        state = self._state
        if self._run.cursor.step == 0 and self._num_done and not state.is_step_committed:
            _LOGGER.warning(
                "Epoch %d has made no optimizer step: all were skipped. A run that counts steps "
                "would never end.",
                state.global_epoch,
            )

    def _end_cut_epoch(self) -> None:
        """Bring an epoch that a hook has ended early to a point where it may end.

        By steps, an open window continues in the next epoch, and a closed one is a safe point,
        where the run may end. By epochs, windows end with their epoch.
        """
        parts, run, state = self._parts, self._run, self._state
        if not self._schedule.is_by_epoch:
            is_safe = run.is_leaving and state.is_step_boundary
            if is_safe and self._boundary.follow(CUT, self._validate):
                self._leave()
        elif not state.is_step_boundary and state.global_iteration > 0:
            _LOGGER.warning(
                "Epoch %d was ended inside an accumulation window: its gradients are dropped, "
                "without an update.",
                state.global_epoch,
            )
            for optimizer in parts.model.discovery.optimizers().values():
                parts.engine.zero_grad(optimizer)
            parts.engine.close_window()
            if self._shared is not None:
                self._shared.drop_window()
            run.is_window_open, run.skip_reason = False, ""
            state.drop_window()

    def _begin_iteration(self, batch: Any, *, is_last: bool) -> bool:
        """Count an iteration and emit its start events; returns whether it opens a window."""
        run, state, schedule = self._run, self._state, self._schedule
        was_boundary, was_committed = state.is_step_boundary, state.is_step_committed
        is_boundary = schedule.accumulation_steps == 1 or due.ends_window(
            schedule,
            iteration=state.global_iteration + 1,
            batch=run.cursor.batch - run.num_skipped_batches,
            is_last=is_last,
            is_manual=bool(run.is_manual),
        )
        state.begin_iteration(schedule.unit, is_boundary=is_boundary)
        self._engine._gradient_norm = None
        self._runner.begin_iteration(state.global_iteration)
        opens_window = was_boundary or state.global_iteration == 1
        try:
            if opens_window:
                run.is_window_open = True
                if self._step_started is not None:
                    self._step_started(state)
            run.batch = run.raw_batch = batch
            if self._batch_started is not None:
                self._batch_started(state)
        except StopIteration as error:
            obstacle = self._runner.check_stop(error)
            if obstacle:
                self._parts.findings.add(FindingKind.OBSTACLE, text=obstacle)
            # The batch was not trained on: counting it would end runs and windows too early.
            state.withdraw_iteration(
                schedule.unit, was_boundary=was_boundary, was_committed=was_committed
            )
            raise
        return opens_window

    def _end_iteration(self, batches: BatchIterator) -> None:
        """Emit the end events of an iteration, notify listeners, and move the cursor."""
        run, state, iteration = self._run, self._state, self._iteration
        losses = self._parts.model._loss_items
        if state.is_step_boundary:
            run.is_window_open = False
            if run.skip_reason:
                self._refuse_late_skip()
        # Before events that may depend on what is logged.
        if self._parts.recorders and not iteration.means:
            iteration.means = {**losses}
        iteration.logs = self._schedule.logs and due.is_log_due(self._schedule, state)
        if self._batch_ended is not None:
            run.batch = run.raw_batch
            self._batch_ended(state, iteration.logs)
        run.batch = run.raw_batch = run.model_outputs = run.loss = None
        if state.is_step_boundary:
            if self._step_ended is not None:
                self._step_ended(state, state.is_step_committed)
            state.global_step += state.is_step_committed
            run.cursor.step += state.is_step_committed
        # After the last event that may change the table.
        iteration.losses, iteration.is_last = losses, batches.is_last
        iteration.norm = self._engine._gradient_norm
        for notify in self._iteration_ended:
            notify(iteration)
        # A graph that a loss still has must not last into the next iteration.
        iteration.losses, iteration.means, iteration.rates = {}, {}, {}
        self._is_complete = batches.is_last
        run.cursor.batch += 1
        run.cursor.sample += batches.num_samples
        state.dataset_iter += 1
        self._num_done += 1
        state.average_iter_time = self._timer.record()
        if state.global_iteration == _IDLE_BATCHES:
            self._check_learning()

    def _refuse_late_skip(self) -> None:
        """Refuse a skip that was requested after the update.

        Raises:
            UsageError: always.
        """
        self._run.skip_reason = ""
        raise UsageError(
            "Context.skip_step() must be called before the update that it skips: in "
            "on_optimizer_step_start at the latest. This window's update was made already."
        )

    def _validate(self) -> bool:
        try:
            return bool(self.val_loop.run())
        except StopIteration as error:
            raise make_stray_stop(error) from error
        finally:
            self._end_pause()

    def _end_pause(self) -> None:
        """Leave out of the time of iterations what has passed since the last one."""
        self._timer.start()
        for notify in self._parts.listeners.paused:
            notify()

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        # An error in setup ends the call before the loop is attached.
        if "_run" in vars(self):
            self._run.batches = None


@final
class EvenBatches(WrappedBatches):
    """Ends the pass of all processes when the data of the first one ends.

    The remaining batches of the others are not used.

    Args:
        batches: those of this process.
        replicas: the processes.
    """

    def __init__(self, batches: BatchIterator, replicas: Replicas) -> None:
        super().__init__(batches)
        self._replicas = replicas

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        has_ended, is_last = self._replicas.agree(batch is _END, self._batches.is_last)
        if has_ended:
            self.close()
            raise StopIteration
        self._describe()
        self.is_last = is_last
        return batch

"""``OptimizerLoop``: the step of one micro-batch, and backward and update if it returns a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from helios.core.signatures import read_signature
from helios.errors import UsageError
from helios.ledger.writer import LedgerWriter
from helios.loops.loop import Loop, make_stray_stop
from helios.loops.step import end_forward, loss_of, record_changes, take_step

_LOGGER = logging.getLogger(__name__)


def refuse_closures(optimizer: Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss itself, several times per step.

    Raises:
        UsageError: if its ``step`` cannot be called without a closure.
    """
    # That of the class: a scheduler replaces the method of the object by a function.
    _, *parameters = read_signature(type(optimizer).step).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise UsageError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, but a "
            "loss that train_step returns is computed once. Call optimizer.step(closure) in "
            "train_step and return None."
        )


class OptimizerLoop(Loop):
    """The default optimizer loop: automatic or manual mode, depending on ``train_step``."""

    _internals: ClassVar[str] = (
        "_attribute _has_begun _is_done _ledger _optimizer _shown _updated_in"
    )

    advances_once = True

    def __init__(self) -> None:
        super().__init__()
        self._is_done = False
        self._optimizer: Optimizer | None = None
        self._attribute: tuple[str, Any] = ("", None)
        self._ledger: LedgerWriter | None = None
        self._has_begun = False
        self._shown: dict[str, Any] = {}
        self._updated_in = 0

    @property
    def done(self) -> bool:
        """Whether the micro-batch is done."""
        return self._is_done

    def _find_progress(self) -> object:
        return self._is_done

    def reset(self) -> None:
        """Prepare for one micro-batch."""
        self._is_done = False

    def advance(self, batch: Any) -> None:
        """Run the step; in automatic mode do backward and, at a boundary, the update.

        Raises:
            UsageError: if ``StopIteration`` is raised, which must not end a loop.
        """
        self._is_done = True
        if not self._has_begun:
            # A resume restores the table as the last batch before it left it.
            items = self._session.model.loss_items.items()
            self._shown = {name: loss for name, loss in items if name.startswith("loss")}
        try:
            self._train(batch)
        except StopIteration as error:
            raise make_stray_stop(error) from error

    def _train(self, batch: Any) -> None:
        session = self._session
        state, turns, engine = session.state, session.turns, session.engine
        watch = turns.begin_step()
        if turns.begins_window and session.is_manual is False:
            engine.drop_old_gradients(self._find_optimizer())
        audit = None if session.audit is None else session.audit.if_due()
        take = take_step if audit is None else audit.take_step
        result = take(session, "train_step", batch, state)
        if type(result) is GeneratorType:
            raise self._make_generator_error()
        loss = loss_of(result)
        if watch is not None:
            watch.conclude(is_manual=loss is None)
        end_forward(session, result, loss)
        if not self._has_begun or session.is_manual is not (loss is None):
            self._settle_mode(is_manual=loss is None)
        if loss is None:
            return
        self._show({"loss": loss.detach()}, result)
        if turns.is_first:
            engine.count_micro_batch()
        optimizer = self._find_optimizer()
        ends_window = state.is_step_boundary
        updates = ends_window and turns.is_last
        if audit is not None:
            # Nothing is sent early here: gradients are compared before they are summed.
            self._backward(loss, do=audit.backward)
            audit.end_backward()
        elif updates and engine.sends_early and session.agreement.frees_gradients:
            with turns.sending(engine, optimizer):
                self._backward(loss)
        else:
            self._backward(loss)
        turns.end_backward(engine, optimizer, self._shown, ends_window=ends_window, updates=updates)
        if updates:
            self._note_update(is_committed=self._update(optimizer))
            engine.close_window()

    def _note_update(self, *, is_committed: bool) -> None:
        """Count the window's step if one of its updates was made.

        An outer loop may run this one several times in a window.
        """
        state, unit = self._session.state, self._session.schedule.unit
        if is_committed:
            self._updated_in = state.global_iteration
            if not state.is_step_committed:
                state.restore_step(unit)
        elif self._updated_in != state.global_iteration:
            state.withdraw_step(unit)

    def _show(self, losses: dict[str, Tensor], *results: Any) -> None:
        """Put detached losses into the table, unless the model has written to it in this batch.

        Args:
            losses: by name.
            results: what the step has returned or yielded, whose other numbers are shown, too.
        """
        self._session.keep_beside(results)
        table, shown = self._session.model.loss_items, self._shown
        # A model that overrides on_training_batch_start without super() does not clear it.
        if table and (table.keys() != shown.keys() or any(table[x] is not shown[x] for x in shown)):
            return
        self._shown = losses
        table.clear()
        table.update(losses)

    def _settle_mode(self, *, is_manual: bool) -> None:
        """Set the mode at the first step.

        Raises:
            UsageError: if a later step is of the other mode.
        """
        if not self._has_begun:
            self._begin(is_manual=is_manual)
        if self._session.is_manual is not is_manual:
            raise self._make_mode_error()

    def _backward(
        self,
        loss: Tensor,
        inputs: Sequence[Tensor] | None = None,
        *,
        do: Callable[..., None] | None = None,
    ) -> None:
        """Do backward, between its events.

        Args:
            loss: the loss.
            inputs: the only parameters that get gradients; ``None`` for all.
            do: what does it; ``None`` for the engine.
        """
        engine, hooks = self._session.engine, self._session.hooks
        if "on_backward_start" in hooks.active:
            hooks.emit("on_backward_start", loss)
            record_changes(self._session, "on_backward_start")
        (do or engine.backward_loss)(loss, inputs)
        if "on_backward_end" in hooks.active:
            hooks.emit("on_backward_end")
            record_changes(self._session, "on_backward_end")

    def _make_generator_error(self) -> UsageError:
        name = type(self._session.model).__name__
        return UsageError(
            f"{name}.train_step is a generator (it contains a `yield`), which needs its own loop: "
            "connect a YieldLoop with trainer.fit_loop.epoch_loop.batch_loop.connect("
            "optimizer_loop=YieldLoop()), or return one loss."
        )

    def _make_mode_error(self) -> UsageError:
        before, now = ("None", "a loss")[:: 1 if self._session.is_manual else -1]
        return UsageError(
            f"{type(self._session.model).__name__}.train_step returned {now} after it had returned "
            f"{before}; it must always return the same. To skip a batch, return a loss of zero."
        )

    def _begin(self, *, is_manual: bool) -> None:
        session = self._session
        self._has_begun = True
        ledger = None if session.recorder is None else session.recorder.ledger
        self._ledger = ledger if ledger is not None and ledger.is_full else None
        if session.is_manual is None:
            session.is_manual = is_manual
            session.state.is_step_boundary |= is_manual and session.schedule.is_by_epoch
        if is_manual:
            session.replicas.require_one_each(
                "A train_step that returns None", remedy=", or return the loss"
            )
            self._warn_of_automatic_options()

    def _warn_of_automatic_options(self) -> None:
        """Warn of options without effect because the model steps its optimizers itself."""
        session = self._session
        ignored = session.engine.automatic_options
        if session.schedulers is not None and session.schedulers.has_intervals_but_step:
            ignored = [*ignored, "Model.scheduler_interval"]
        if session.audit is not None:
            session.audit = None
            ignored = [*ignored, "Trainer(audit=...)"]
        if ignored:
            _LOGGER.warning(
                "%s has no effect: train_step returns None, so the model clips and steps itself. "
                "Return the loss to let Helios do it.",
                " and ".join(ignored),
            )

    def _find_optimizer(self) -> Optimizer:
        """Return the one optimizer; search again if its attribute holds another object."""
        attributes = vars(self._session.model)
        name, holder = self._attribute
        if self._optimizer is None or attributes.get(name) is not holder:
            path, self._optimizer = self._discover_optimizer()
            name = path.partition(".")[0]
            self._attribute = (name, attributes[name])
        return self._optimizer

    def _discover_optimizer(self) -> tuple[str, Optimizer]:
        optimizers = self._session.model.discovery.optimizers()
        if len(optimizers) != 1:
            raise UsageError(
                "When train_step returns a loss, the model must have exactly one optimizer as an "
                f"attribute, found {sorted(optimizers) or 'none'}. For several, call backward and "
                "step them in train_step and return None, or use a YieldLoop, both with "
                'sharding="none".'
            )
        path, optimizer = next(iter(optimizers.items()))
        refuse_closures(optimizer)
        return path, optimizer

    def _update(self, optimizer: Optimizer, schedules_of: Optimizer | None = None) -> bool:
        """Make an update, unless a hook has requested to skip it; returns whether it was made.

        Args:
            optimizer: the optimizer to step.
            schedules_of: the optimizer whose schedulers step; ``None`` for all of them.
        """
        session, context = self._session, self._session.context
        engine, hooks, active = session.engine, session.hooks, session.hooks.active
        engine.average_gradients(optimizer)
        if session.turns.has_message:
            session.turns.receive()
        if self._ledger is not None:
            self._ledger.take_gradients(optimizer)
        context.stepping_optimizer = optimizer
        if "on_optimizer_step_start" in active:
            hooks.emit("on_optimizer_step_start", optimizer)
        if session.agreement.agree_on_skip():
            is_committed = False
        else:
            if engine.clips:
                engine.clip_gradients(optimizer)
            is_committed = engine.optimizer_step(optimizer)
            if is_committed is None:
                raise UsageError(
                    f"{type(engine).__name__}.optimizer_step must return whether the update was "
                    "made, True or False, got None: no step would count. Return "
                    "super().optimizer_step(optimizer), or True."
                )
        context.is_optimizer_step_committed = is_committed
        schedulers = session.schedulers
        if is_committed and schedulers is not None and not schedulers.is_empty:
            schedulers.after_step(schedules_of)
        if "on_before_zero_grad" in active:
            hooks.emit("on_before_zero_grad", optimizer)
        engine.zero_grad(optimizer)
        if "on_optimizer_step_end" in active:
            hooks.emit("on_optimizer_step_end", optimizer, is_committed)
        context.stepping_optimizer = None
        return is_committed

    def teardown(self) -> None:
        """Release the optimizer of this training."""
        self._optimizer = None
        self._ledger = None
        self._has_begun = False
        self._shown = {}
        self._updated_in = 0
        super().teardown()

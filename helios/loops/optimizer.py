"""``OptimizerLoop``: the step of one micro-batch, and backward and update if it returns a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from helios.core.loss_means import WeightedLoss
from helios.core.utils import parameters_of, read_signature
from helios.engines.engine import redefines
from helios.errors import UsageError
from helios.hooks.bus import check_call
from helios.loops.loop import Loop, make_stray_stop
from helios.loops.override_checks import EarlierGradients, OwnRound, StepsMade
from helios.loops.repeated_steps import PaddingTurns
from helios.loops.step import (
    end_forward,
    find_loss,
    loss_of,
    losses_in,
    record_changes,
    take_step,
    weighted_in,
)
from helios.loops.updates import Updates
from helios.model.model import Model
from helios.session import Place

_LOGGER = logging.getLogger(__name__)
_SECOND_BACKWARD = (
    "{name}.train_step must leave backward to Helios if it returns its loss, and must not keep a "
    "graph from one batch to the next, but backward went through the graph a second time. Remove "
    "its call of backward, or detach() what it keeps."
)


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
    """The default optimizer loop: automatic or manual mode, depending on ``train_step``.

    In automatic mode a micro-batch is :meth:`forward`, :meth:`backward` and :meth:`update`. An
    ``advance`` of your own calls the same three: the first two as often as it needs, and ``update``
    once for each optimizer. It then trains on any number of replicas, processes and micro-batches;
    a call that is missing is an error.
    """

    _internals: ClassVar[str] = (
        "_attribute _has_begun _is_counted _is_done _is_weighted _optimizer _own_backward "
        "_padding _round _shown _unused _updated_in _updates"
    )

    def __init__(self) -> None:
        super().__init__()
        self._is_done = False
        self._optimizer: Optimizer | None = None
        self._attribute: tuple[str, Any] = ("", None)
        # In a process that has a turn without a replica.
        self._padding: PaddingTurns | None = None
        self._has_begun = False
        self._shown: dict[str, Any] = {}
        self._updated_in = 0
        # The calls of an advance of the user's; None in advance() below.
        self._round: OwnRound | None = None
        self._is_counted = False
        # Optimizers that own rounds have left with gradients of the open window.
        self._unused: set[str] = set()
        self._own_backward: Callable[[Mapping[str, Tensor]], None] | None = None
        # Whether the last step has returned a loss with a weight.
        self._is_weighted = False

    @property
    def done(self) -> bool:
        """Whether the micro-batch is done."""
        return self._is_done

    def reset(self) -> None:
        """Prepare for one micro-batch."""
        self._is_done = False

    def advance(self, batch: Any) -> None:
        """Train on one micro-batch, and make the update at the end of a window.

        Raises:
            UsageError: if ``StopIteration`` is raised, which must not end a loop.
        """
        session, outer = self._session, self._round
        turns, engine = session.turns, session.engine
        if outer is not None:
            outer.earlier.add_back()
        self._round, self._is_counted, turns.has_collected = None, False, False
        try:
            result = self.forward(batch)
            is_manual = bool(session.is_manual)
            if not is_manual:
                optimizer = self._find_optimizer()
                updates = session.state.is_step_boundary and turns.is_last
                if self._own_backward is None and not self._is_weighted:
                    result = session.attached_loss
                if updates and session.gradients.sends_early and self._may_send_early():
                    session.place = Place.BACKWARD
                    with turns.sending(optimizer):
                        self.backward(result)
                else:
                    self.backward(result)
                self.update(optimizer)
                if not turns.has_collected:
                    raise self._make_lost_error()
                if updates:
                    engine.close_window()
        except (StopIteration, RuntimeError) as error:
            self._explain(error)
            raise
        if outer is not None:
            outer.see_default(is_manual=is_manual)
            self._round = outer

    def _explain(self, error: StopIteration | RuntimeError) -> None:
        """Say what an error of Python or PyTorch means here."""
        if isinstance(error, StopIteration):
            raise make_stray_stop(error) from error
        if "backward through the graph a second time" in str(error):
            name = type(self._session.model).__name__
            error.args = (f"{_SECOND_BACKWARD.format(name=name)}\n\n{error}",)

    def forward(self, batch: Any) -> Any:
        """Run ``train_step`` on a batch, between the events of the forward pass.

        Args:
            batch: the batch, on the device.

        Returns:
            What ``train_step`` has returned: a loss, a ``WeightedLoss``, a dict with losses, or
            ``None`` if it does backward and the update itself.

        Raises:
            UsageError: if it has returned something else.
        """
        session, turns = self._session, self._session.turns
        self._is_done = True
        if not self._has_begun:
            self._keep_shown()
            is_own = redefines(session.model, Model, "backward")
            self._own_backward = session.model.backward if is_own else None
            self._padding = PaddingTurns(session) if session.gradients.has_idle_turn else None
        watch = turns.begin_step()
        if turns.begins_window and session.is_manual is False and self._round is None:
            session.gradients.drop_old(self._find_optimizer())
        take = take_step if self._padding is None else self._padding.take_step
        made = (
            None if self._has_begun else StepsMade(*session.model.discovery.optimizers().values())
        )
        try:
            result = take(session, "train_step", batch, session.state)
        finally:
            if made is not None:
                made.close()
        if type(result) is GeneratorType:
            raise self._make_generator_error()
        takes_several = self._round is not None or self._own_backward is not None
        loss = loss_of(result, takes_several=takes_several)
        weighted = None if loss is result else weighted_in(result)
        self._is_weighted = weighted is not None
        if watch is not None:
            watch.conclude(is_manual=loss is None)
        if made is not None and made.count and loss is not None:
            self._warn_of_double_steps()
        end_forward(session, result, loss if weighted is None else weighted.mean)
        if not self._has_begun or session.is_manual is not (loss is None):
            self._fix_mode(is_manual=loss is None)
        if self._round is not None:
            self._round.see_forward(is_manual=loss is None)
        if loss is not None:
            self._show({"loss": weighted or loss.detach()}, result)
        return result

    def backward(
        self, losses: Any, optimizer: Optimizer | None = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradients of a loss to those of the micro-batch, between the backward events.

        If the model overrides :meth:`Model.backward`, that method computes them.

        Args:
            losses: a loss, or what :meth:`forward` has returned.
            optimizer: the only optimizer whose parameters get gradients; ``None`` for all.
            retain_graph: whether another backward follows through the same graph, as for
                ``Tensor.backward``.

        Raises:
            UsageError: before :meth:`forward`, or after :meth:`update`.
        """
        session, inputs = self._session, None
        engine, hooks = session.engine, session.hooks
        if self._round is not None:
            is_sharded = session.replicas.is_sharded
            self._round.begin_backward(losses, optimizer, is_sharded=is_sharded)
        if optimizer is not None:
            inputs = [each for each in parameters_of(optimizer) if each.requires_grad]
        if not self._is_counted:
            self._is_counted = True
            if session.turns.is_first:
                engine._count_micro_batch()
        count, own, has_weight = self._updates.count_loss, self._round, self._is_weighted
        is_plain = self._updates.is_plain and type(losses) is Tensor
        loss = losses if is_plain else count(losses, optimizer, own, is_weighted=has_weight)
        if "on_backward_start" in hooks.active:
            hooks.emit("on_backward_start", loss)
            record_changes(session, "on_backward_start")
        if self._own_backward is None and not retain_graph:
            engine.backward_loss(loss, inputs)
        else:
            self._compute_otherwise(losses, inputs)
        if "on_backward_end" in hooks.active:
            hooks.emit("on_backward_end")
            record_changes(session, "on_backward_end")
        if self._padding is not None:
            self._padding.end_backward()
        if self._round is not None:
            self._round.end_backward()

    def update(self, optimizer: Optimizer | None = None) -> bool:
        """Hand the gradients of a micro-batch over, and make the update if one is due.

        One is due in the last micro-batch of a window, when the last replica of this process has
        its turn: the average over micro-batches and replicas, the events, clipping, the step and
        the schedulers of the optimizer. If a loss was passed to :meth:`backward` for several
        optimizers, the first of their updates averages the gradients of all, emits
        ``on_optimizer_step_start`` for each and clips them together, and each call makes the step
        of its own. All processes must call it equally often.

        Args:
            optimizer: the optimizer to step; may be omitted if the model has only one.

        Returns:
            Whether the weights were updated.

        Raises:
            UsageError: before :meth:`backward`, and for a second call.
        """
        session, owner = self._session, None
        state, turns = session.state, session.turns
        if optimizer is None:
            optimizer = self._find_optimizer()
        ends_window = state.is_step_boundary
        group: tuple[Optimizer, ...] = (optimizer,)
        if self._round is not None:
            owner, group = self._begin_own_update(self._round, optimizer)
        updates = ends_window and turns.is_last
        turns.has_collected = True
        if group:
            turns.end_backward(group, self._shown, ends_window=ends_window, updates=updates)
        if not updates:
            return False
        is_committed = self._updates.make(optimizer, owner, group)
        if is_committed:
            self._updated_in = state.global_iteration
        if is_committed is not state.is_step_committed:
            self._correct_step()
        return is_committed

    def _correct_step(self) -> None:
        """Count the window's step if one of its updates was made.

        An outer loop may run this one several times in a window.
        """
        state, unit = self._session.state, self._session.schedule.unit
        if self._updated_in != state.global_iteration:
            state.withdraw_step(unit)
        elif not state.is_step_committed:
            state.restore_step(unit)

    def _may_send_early(self) -> bool:
        """Whether gradients may leave during backward: each is then computed once, and kept."""
        return self._own_backward is None and self._session.agreement.frees_gradients

    def _compute_otherwise(self, losses: Any, inputs: Sequence[Tensor] | None) -> None:
        """Compute gradients by the model's own backward, or keeping the graph.

        Raises:
            UsageError: if the model has left no gradients.
        """
        session = self._session
        if self._own_backward is None:
            session.engine.backward_loss(find_loss(losses), inputs, retain_graph=True)
            return
        optimizers = session.model.discovery.optimizers().values()
        earlier = EarlierGradients(optimizers)
        self._own_backward(losses_in(losses))
        parameters = [x for each in optimizers for x in parameters_of(each) if x.requires_grad]
        if parameters and all(each.grad is None for each in parameters):
            raise UsageError(
                f"{type(session.model).__name__}.backward(losses) must leave gradients in the "
                "parameters, got none. Call self.engine.backward_loss(loss), or assign "
                "parameter.grad."
            )
        earlier.add_back()

    def _guarded_advance(self) -> Callable[..., None]:
        """Return ``advance``; one of the user's must call all that belongs to a micro-batch."""
        advance = super()._guarded_advance()
        if not self._has_own_advance:
            return advance

        def checked(*args: Any) -> None:
            self._begin_round()
            try:
                advance(*args)
            except StopIteration:
                self._end_round()
                raise
            self._end_round()

        return checked

    def _begin_own_update(
        self, own: OwnRound, optimizer: Optimizer
    ) -> tuple[Optimizer | None, tuple[Optimizer, ...]]:
        """Check an update.

        Returns:
            The optimizer whose schedulers step with it, ``None`` for all; and those whose gradients
            are collected now, none if an earlier update has done it.
        """
        path, group = own.begin_update(optimizer)
        for each in group:
            if each in own.weights:
                weights, replica = self._session.engine._weights, self._session.turns.replica
                weights.add(each, replica, own.weights[each])
        optimizers = self._session.model.discovery.optimizers()
        if self._session.state.is_step_boundary:
            self._unused.discard(path)
        else:
            self._unused.add(path)
        if group and self._session.turns.is_over:
            self._session.turns.reopen()
        return optimizer if len(optimizers) > 1 else None, group

    def _begin_round(self) -> None:
        session, name = self._session, type(self).__name__
        optimizers = session.model.discovery.optimizers()
        if session.turns.is_first and not session.engine._open_micro_batches:
            self._unused.clear()
        if session.turns.begins_window:
            for optimizer in optimizers.values():
                session.gradients.drop_old(optimizer)
        self._is_counted = False
        self._round = OwnRound(name, optimizers)

    def _end_round(self) -> None:
        session, own = self._session, self._round
        assert own is not None
        self._round = None
        own.earlier.add_back()
        own.end()
        ends_window = session.state.is_step_boundary
        if ends_window and self._unused:
            raise own.make_unused_error(self._unused)
        if ends_window and session.turns.is_last and not session.is_manual:
            session.engine.close_window()

    def _keep_shown(self) -> None:
        """Find the losses of Helios in the table: a resume restores it as a batch has left it."""
        items = self._session.model.loss_items.items()
        self._shown = {name: loss for name, loss in items if name.startswith("loss")}

    def _show(self, losses: dict[str, Any], *results: Any) -> None:
        """Put detached losses into the table, unless the model has written to it in this batch.

        Args:
            losses: by name; of one with a weight the mean is shown.
            results: what the step has returned or yielded, whose other numbers are shown, too.
        """
        session = self._session
        if not self._updates.is_plain:
            session.turns.weighted = weighted = {
                name: (loss.mean, loss.sum.detach(), loss.weight)
                for name, loss in losses.items()
                if isinstance(loss, WeightedLoss)
            }
            losses = losses | {name: shown for name, (shown, *_) in weighted.items()}
        if session.beside or len(results) != 1 or not isinstance(results[0], Tensor):
            session.keep_beside(results)
        table, shown = session.model.loss_items, self._shown
        # A model that overrides on_training_batch_start without super() does not clear it.
        if table and (table.keys() != shown.keys() or any(table[x] is not shown[x] for x in shown)):
            return
        self._shown = losses
        table.clear()
        table.update(losses)

    def _fix_mode(self, *, is_manual: bool) -> None:
        """Set the mode at the first step.

        Raises:
            UsageError: if a later step is of the other mode.
        """
        if not self._has_begun:
            self._begin(is_manual=is_manual)
        if self._session.is_manual is not is_manual:
            raise self._make_mode_error()

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
        self._updates = Updates(session)
        if session.is_manual is None:
            session.is_manual = is_manual
            session.state.is_step_boundary |= is_manual and session.schedule.is_by_epoch
        if is_manual:
            session.replicas.require_one_each(
                "A train_step that returns None", remedy=", or return the loss"
            )
            self._warn_of_automatic_options()
            if self._own_backward is not None:
                _LOGGER.warning(
                    "%s.backward is never called: train_step returns None, so it computes "
                    "gradients itself. Return the losses, or remove the method.",
                    type(session.model).__name__,
                )
        else:
            self._check_own_parts()

    def _check_own_parts(self) -> None:
        """Check what takes the place of Helios' own backward and update.

        Raises:
            UsageError: for a ``Model.backward`` in a sharded run, and for an optimizer that needs
                a closure.
            ArgumentTypeError: for a ``Model.backward`` that does not take the losses.
        """
        session = self._session
        if self._round is not None:
            for optimizer in session.model.discovery.optimizers().values():
                refuse_closures(optimizer)
        if self._own_backward is None:
            return
        place = f"{type(session.model).__name__}.backward"
        check_call(place, self._own_backward, ("losses",))
        if session.replicas.is_sharded:
            raise UsageError(
                f'{place} must not be overridden with sharding="full", whose gradients are summed '
                'during backward. Return one loss, or use sharding="none".'
            )

    def _make_lost_error(self) -> UsageError:
        return UsageError(
            f"{type(self).__name__}.update(optimizer) must call super().update(optimizer), got no "
            "call: the gradients would be lost. Return what it returns."
        )

    def _warn_of_double_steps(self) -> None:
        _LOGGER.warning(
            "%s.train_step makes steps of an optimizer and returns its loss, with which Helios "
            "makes another one. Return None if it updates the weights itself, or leave that out.",
            type(self._session.model).__name__,
        )

    def _warn_of_automatic_options(self) -> None:
        """Warn of options without effect because the model steps its optimizers itself."""
        session = self._session
        ignored = session.engine._automatic_options
        if session.schedulers is not None and session.schedulers.has_intervals_but_step:
            ignored = [*ignored, "Model.scheduler_interval"]
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
                'sharding="none"; an advance of your own calls update(optimizer) for each.'
            )
        path, optimizer = next(iter(optimizers.items()))
        refuse_closures(optimizer)
        return path, optimizer

    def teardown(self) -> None:
        """Release the optimizer of this training."""
        self._optimizer = None
        self._has_begun = False
        self._shown = {}
        self._updated_in = 0
        self._padding = self._round = self._own_backward = None
        vars(self).pop("_updates", None)
        self._unused = set()
        super().teardown()

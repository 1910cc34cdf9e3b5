"""Makes the updates of optimizers: what belongs to one, in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import parameters_of, read_rates
from helios.engines.engine import Engine, redefines
from helios.errors import UsageError
from helios.loops.override_checks import OwnRound
from helios.loops.step import find_loss, weighted_in
from helios.session import Place, Session


@final
class Updates:
    """Makes the updates of a training run.

    Args:
        session: the run.

    Attributes:
        is_plain: whether all processes know that no loss has a weight.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Optimizers whose gradients are averaged and clipped, and whether they skip their update.
        self._is_skipped: dict[Optimizer, bool] = {}
        self._draws = session.engine._find_draws()
        self.is_plain = False

    def count_loss(
        self,
        losses: Any,
        optimizer: Optimizer | None,
        own: OwnRound | None,
        *,
        is_weighted: bool,
    ) -> Tensor:
        """Return the loss in what is passed to backward; its weight is added to the window's.

        Args:
            losses: a loss, or what the step has returned.
            optimizer: the only one whose parameters get gradients; ``None`` for all.
            own: the calls of an ``advance`` of the user's, which adds the weights in its updates.
            is_weighted: whether the step has returned a loss with a weight.

        Raises:
            UsageError: for a plain loss where others have weights, and the reverse.
        """
        session, loss, weighted = self._session, find_loss(losses), weighted_in(losses)
        if weighted is None and is_weighted:
            raise UsageError(
                "OptimizerLoop.backward must get a WeightedLoss if train_step returns one: the "
                "gradients are divided by its weight. Pass what forward(batch) has returned, or "
                "WeightedLoss(sum=loss, weight=...)."
            )
        optimizers: Iterable[Optimizer] = () if optimizer is None else (optimizer,)
        for each in optimizers or session.model.discovery.optimizers().values():
            weight = None if weighted is None else weighted.weight
            if own is None:
                session.engine._weights.add(each, session.turns.replica, weight)
            else:
                own.count_weight(each, weight)
        return loss

    def make(
        self, optimizer: Optimizer, schedules_of: Optimizer | None, group: Sequence[Optimizer]
    ) -> bool:
        """Make an update, unless a hook has requested to skip it; returns whether it was made.

        Args:
            optimizer: the optimizer to step.
            schedules_of: the optimizer whose schedulers step; ``None`` for all of them.
            group: those whose gradients are averaged and clipped with its own; empty if an earlier
                update has done it.
        """
        session = self._session
        hooks, active = session.hooks, session.hooks.active
        engine = session.engine
        if group:
            is_skipped = self._average_and_clip(group)
            for each in group[1:]:
                self._is_skipped[each] = is_skipped
        else:
            is_skipped = self._is_skipped.pop(optimizer)
            session.stepping_optimizer = optimizer
        is_committed = False
        if not is_skipped:
            step = engine.optimizer_step if self._draws is None else self._step_without_draws
            is_committed = step(optimizer)
        if is_committed is None:
            raise UsageError(
                f"{type(session.engine).__name__}.optimizer_step must return whether it made "
                "the update, True or False, got None: no step would count. Return "
                "super().optimizer_step(optimizer), or True."
            )
        session.is_optimizer_step_committed = is_committed
        schedulers = session.schedulers
        if is_committed and schedulers is not None and not schedulers.is_empty:
            session.rates[optimizer] = read_rates(optimizer)
            schedulers.after_step(schedules_of)
        if "on_before_zero_grad" in active:
            hooks.emit("on_before_zero_grad", optimizer)
        engine.zero_grad(optimizer)
        if "on_optimizer_step_end" in active:
            hooks.emit("on_optimizer_step_end", optimizer, is_committed)
        session.stepping_optimizer = None
        return is_committed

    def _step_without_draws(self, optimizer: Optimizer) -> bool:
        """Make the update of a sharded model, which must not draw random numbers."""
        own, name = self._session.engine, f"{type(optimizer).__name__}.step()"
        if redefines(own, Engine, "optimizer_step"):
            name = f"{type(own).__name__}.optimizer_step, with {name},"
        assert self._draws is not None
        with self._draws.refused(optimizer, name):
            return own.optimizer_step(optimizer)

    def _average_and_clip(self, group: Sequence[Optimizer]) -> bool:
        """Average and clip the gradients of one backward, between the events of their updates.

        Args:
            group: its optimizers. The first one is stepped now.

        Returns:
            Whether their updates are skipped.
        """
        session, is_empty = self._session, False
        session.place = Place.UPDATE
        engine = session.engine
        engine._group = group
        if len(group) > 1:
            engine._group_parameters = self._in_order(group)
        for optimizer in group:
            is_empty |= not self.is_plain and self._read_weight(optimizer) == 0
            engine.average_gradients(optimizer)
            if session.turns.has_message:
                session.turns.receive()
        for optimizer in group:
            session.stepping_optimizer = optimizer
            if "on_optimizer_step_start" in session.hooks.active:
                session.hooks.emit("on_optimizer_step_start", optimizer)
        session.stepping_optimizer = group[0]
        if session.agreement.agree_on_skip() or is_empty:
            return True
        for optimizer in group if engine._clips else ():
            engine.clip_gradients(optimizer)
        return False

    def _read_weight(self, optimizer: Optimizer) -> float | None:
        """Let the engine divide by the weights of the window; returns their sum, if there are any.

        All processes call this together.
        """
        session = self._session
        weights = session.engine._weights
        session.engine._weight = weight = weights.pop_sum(optimizer)
        if weight is None:
            self.is_plain = weights.are_plain(session.model.discovery.optimizers().values())
        return weight

    def _in_order(self, group: Iterable[Optimizer]) -> list[Tensor]:
        """Return the parameters of optimizers once each, in the order of the model's networks."""
        model = self._session.model
        found = {id(each): each for optimizer in group for each in parameters_of(optimizer)}
        networks = model.discovery.modules()
        places = {name: place for place, name in enumerate(vars(model))}
        names = sorted(networks, key=lambda path: places.get(path.partition(".")[0], len(places)))
        order = [id(each) for name in names for each in networks[name].parameters()]
        return [*(found.pop(number) for number in order if number in found), *found.values()]

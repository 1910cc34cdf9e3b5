"""Makes the updates of optimizers: what belongs to one, in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import parameters_of, read_rates
from helios.engines.engine import Engine, redefines
from helios.errors import UsageError
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
        self._draws = session.engine._find_draws()
        self.is_plain = False

    def make(self, group: Sequence[Optimizer], *, moves_all: bool) -> bool:
        """Make an update, unless a hook has requested to skip it; returns whether it was made.

        Args:
            group: the optimizers of the same losses, whose gradients are averaged and clipped
                together.
            moves_all: whether all schedulers step with it, and not only those of the optimizers.
        """
        session = self._session
        hooks, active, engine = session.hooks, session.hooks.active, session.engine
        schedulers = session.schedulers
        step = engine.optimizer_step if self._draws is None else self._step_without_draws
        is_skipped, is_made = self._average_and_clip(group), False
        for optimizer in group:
            session.stepping_optimizer = optimizer
            is_committed = not is_skipped and step(optimizer)
            if is_committed is None:
                raise UsageError(
                    f"{type(engine).__name__}.optimizer_step must return whether it made the "
                    "update, True or False, got None: no step would count. Return "
                    "super().optimizer_step(optimizer), or True."
                )
            session.is_optimizer_step_committed = is_committed
            is_made |= is_committed
            if is_committed and schedulers is not None and not schedulers.is_empty:
                session.rates[optimizer] = read_rates(optimizer)
                schedulers.after_step(None if moves_all else optimizer)
            if "on_before_zero_grad" in active:
                hooks.emit("on_before_zero_grad", optimizer)
            engine.zero_grad(optimizer)
            if "on_optimizer_step_end" in active:
                hooks.emit("on_optimizer_step_end", optimizer, is_committed)
        session.stepping_optimizer = None
        return is_made

    def _step_without_draws(self, optimizer: Optimizer) -> bool:
        """Make the update of a sharded model, which must not draw random numbers."""
        own, name = self._session.engine, f"{type(optimizer).__name__}.step()"
        if redefines(own, Engine, "optimizer_step"):
            name = f"{type(own).__name__}.optimizer_step, with {name},"
        assert self._draws is not None
        with self._draws.refused(optimizer, name):
            return own.optimizer_step(optimizer)

    def _average_and_clip(self, group: Sequence[Optimizer]) -> bool:
        """Average and clip gradients together, with the events between; returns whether to skip."""
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

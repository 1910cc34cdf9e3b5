"""The first update of a run whose engine or step is the user's: whether it does what it says.

An engine that computes no gradient, makes no step or keeps gradients trains something else, in
silence; so does a step that updates the weights itself and returns its loss, too.
"""

from __future__ import annotations

import logging
from typing import final

from torch.optim import Optimizer

from helios.core.utils import parameters_of
from helios.engines.engine import Engine, redefines
from helios.errors import UsageError
from helios.loops.rounds import has_gradients

_LOGGER = logging.getLogger(__name__)


@final
class StepsMade:
    """Counts the steps of optimizers while something of the user's runs.

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.count = 0
        self._handles = [each.register_step_post_hook(self._see) for each in optimizers]

    def _see(self, *args: object) -> None:
        self.count += 1

    def close(self) -> int:
        """Stop counting; returns the number of steps."""
        for handle in self._handles:
            handle.remove()
        return self.count


@final
class FirstUpdate:
    """Takes the place of a user's engine in the first update, and looks at what that does.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = type(engine).__name__

    @staticmethod
    def of(engine: Engine) -> FirstUpdate | None:
        """Return one if methods of the engine that an update calls are the user's."""
        names = ("backward_loss", "average_gradients", "optimizer_step", "zero_grad")
        is_own = any(redefines(engine, Engine, name) for name in names)
        return FirstUpdate(engine) if is_own else None

    @property
    def _clips(self) -> bool:
        """As of the engine."""
        return self._engine._clips

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average gradients; warn if there are none, and some parameter is trained."""
        self._engine.average_gradients(optimizer)
        is_trained = any(each.requires_grad for each in parameters_of(optimizer))
        if is_trained and not has_gradients(optimizer) and self._redefines("backward_loss"):
            _LOGGER.warning(
                "%s.backward_loss left no gradients in the parameters: nothing was learned. If the "
                "loss depends on them, call super().backward_loss(loss, inputs), or "
                "loss.backward().",
                self._name,
            )

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip gradients as the engine does."""
        self._engine.clip_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the update; warn if it is said to be made without a step of the optimizer."""
        made = StepsMade(optimizer)
        try:
            is_committed = self._engine.optimizer_step(optimizer)
        finally:
            steps = made.close()
        if is_committed and not steps and self._redefines("optimizer_step"):
            _LOGGER.warning(
                "%s.optimizer_step returned True, but optimizer.step() was not called. If it does "
                "not change the weights itself, call super().optimizer_step(optimizer).",
                self._name,
            )
        return is_committed

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients.

        Raises:
            UsageError: if one is left.
        """
        self._engine.zero_grad(optimizer)
        gradients = (each.grad for each in parameters_of(optimizer))
        if any(each is not None and bool(each.any()) for each in gradients):
            raise UsageError(
                f"{self._name}.zero_grad must clear the gradients, but some are left: the next "
                "window would add to them. Call super().zero_grad(optimizer), or "
                "optimizer.zero_grad()."
            )

    def _redefines(self, name: str) -> bool:
        return redefines(self._engine, Engine, name)

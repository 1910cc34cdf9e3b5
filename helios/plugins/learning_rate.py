"""``LearningRateMonitor``: log learning rates and momenta.

It logs the rate that the last update used: a scheduler steps right after the optimizer, so at the
end of a batch the optimizer already holds the rate of the next update.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


def _read(optimizer: Optimizer, *, with_momentum: bool) -> list[dict[str, Any]]:
    """Return the numbers of each group; tensors, which schedulers change in place, are copied."""
    groups = []
    for group in optimizer.param_groups:
        numbers = {"lr": group["lr"]}
        if with_momentum and "momentum" in group:
            numbers["momentum"] = group["momentum"]
        elif with_momentum and "betas" in group:
            numbers["momentum"] = group["betas"][0]
        groups.append(
            {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in numbers.items()
            }
        )
    return groups


def _names_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the groups: their own if all are different, otherwise their numbers.

    A single group needs no name.
    """
    groups = optimizer.param_groups
    names = [str(group["name"]) for group in groups if "name" in group]
    if len(groups) == 1:
        return [""]
    if len(set(names)) == len(groups):
        return names
    return [str(number) for number in range(len(groups))]


@PLUGIN_REGISTRY.register
class LearningRateMonitor(Plugin):
    """Logs the learning rates with the losses, in automatic and manual mode.

    The scalars are named ``lr``; ``lr/<optimizer>`` if the model has several optimizers; and
    ``lr/<optimizer>/<group>`` for each group of an optimizer with several, by its ``"name"`` if
    all of them have one, otherwise by number. The values are those that the last step of the
    batch has used; if a batch makes no step (inside a window, or in manual mode), those that the
    optimizer holds.

    Args:
        momentum: also log the momentum (``momentum`` or the first of ``betas``), under names that
            begin with ``momentum``.
        plug_id: unique id of the plugin.

    Example:
        >>> LearningRateMonitor(momentum=True).plug_id
        'learning-rate'
    """

    _internals: ClassVar[str] = "_has_logged _used _with_momentum"

    unsaved = ("_used", "_has_logged")

    def __init__(self, *, momentum: bool = False, plug_id: str = "learning-rate") -> None:
        super().__init__(plug_id)
        self._with_momentum = bool(momentum)
        self._used: dict[Optimizer, list[dict[str, Any]]] = {}
        self._has_logged = False

    def setup(self) -> None:
        """Forget an earlier run."""
        self._used = {}
        self._has_logged = False

    @asks_nothing
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Record the values that the step uses."""
        self._used[optimizer] = _read(optimizer, with_momentum=self._with_momentum)

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Log, if logging is due."""
        if should_log:
            self._has_logged = True
            self.context.log(self._find_numbers())
        self._used = {}

    def on_training_end(self) -> None:
        """Warn if nothing was logged in the whole run."""
        if not self._has_logged and self.context.start_step == 0:
            _LOGGER.warning(
                "Plugin %r has logged nothing: logging was never due. Set "
                "Trainer(print_frequency=...), or make it smaller.",
                self.plug_id,
            )

    def teardown(self) -> None:
        """Release the optimizers."""
        self._used = {}

    def _find_numbers(self) -> dict[str, Any]:
        optimizers = self.context.optimizers
        numbers: dict[str, Any] = {}
        for path, optimizer in optimizers.items():
            used = self._used.get(optimizer)
            groups = used or _read(optimizer, with_momentum=self._with_momentum)
            names = _names_of(optimizer)
            for name, group in zip(names, groups, strict=False):
                owner = path if name or len(optimizers) > 1 else ""
                for number, value in group.items():
                    numbers["/".join(filter(None, (number, owner, name)))] = value
        return numbers

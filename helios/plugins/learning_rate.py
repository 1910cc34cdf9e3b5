"""``LearningRateMonitor``: log learning rates and momenta.

It logs the rate that the last update used: a scheduler steps right after the optimizer, so at the
end of a batch the optimizer already holds the rate of the next update.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from helios.counters import TrainingState
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin


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

    _internals: ClassVar[str] = "_momentum _used"

    def __init__(self, *, momentum: bool = False, plug_id: str = "learning-rate") -> None:
        super().__init__(plug_id)
        self._momentum = momentum
        self._used: dict[str, float | Tensor] = {}

    def setup(self) -> None:
        """Forget an earlier run."""
        self._used = {}

    @asks_nothing
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Record the values that the step uses."""
        for path, each in self.context.optimizers.items():
            if each is optimizer:
                self._used |= self._read(path, each)

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Log, if logging is due."""
        if should_log:
            held: dict[str, float | Tensor] = {}
            for path, optimizer in self.context.optimizers.items():
                held |= self._read(path, optimizer)
            self.context.log(held | self._used)
        self._used = {}

    def _read(self, path: str, optimizer: Optimizer) -> dict[str, float | Tensor]:
        """Return the values of each group; tensors are copied, as schedulers change them."""
        groups, is_one = optimizer.param_groups, len(self.context.optimizers) == 1
        has_names = len({group.get("name") for group in groups} - {None}) == len(groups)
        values: dict[str, float | Tensor] = {}
        for number, group in enumerate(groups):
            name = str(group["name"] if has_names else number) if len(groups) > 1 else ""
            owner = path if name or not is_one else ""
            read = {"lr": group["lr"]}
            if self._momentum and ("momentum" in group or "betas" in group):
                read["momentum"] = group.get("momentum", group.get("betas", [None])[0])
            for kind, value in read.items():
                copy = value.detach().clone() if isinstance(value, Tensor) else value
                values["/".join(filter(None, (kind, owner, name)))] = copy
        return values

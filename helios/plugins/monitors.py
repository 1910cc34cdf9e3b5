"""``LearningRateMonitor`` and ``GradientNormMonitor``: log rates and norms of each update.

A scheduler steps right after the optimizer, so at the end of a batch the optimizer already holds
the rate of the next update: the rate is read before the step. A norm is computed at every update,
on the device of the gradients, and read only when logging is due.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import parameters_of
from helios.core.wrappers import name_parameters
from helios.counters import TrainingState
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

_LOGGER = logging.getLogger(__name__)


@PLUGIN_REGISTRY.register
class LearningRateMonitor(Plugin):
    """Logs the learning rates with the losses, in automatic and manual mode.

    The scalars are named ``lr``; ``lr/<optimizer>`` if the model has several optimizers; and
    ``lr/<optimizer>/<group>`` for each group of an optimizer with several, by its ``"name"`` if
    all of them have one, otherwise by number. The values are those that the last step of the batch
    used; if a batch makes no step (inside a window, or in manual mode), the current ones of the
    optimizer.

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
        """Discard the values of an earlier run."""
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


@PLUGIN_REGISTRY.register
class GradientNormMonitor(Plugin):
    """Logs the norm of the gradients of each update, with the losses.

    Gradients are those of the whole accumulation window, averaged and not yet clipped. The scalars
    are named ``grad_norm``, or ``grad_norm/<optimizer>`` if the model has several optimizers, with
    ``/<network>`` and ``/<network>.<parameter>`` appended for networks and parameters; a parameter
    in no network is named by its optimizer and number. If logging is due inside a window, the norm
    of the last update is logged.

    In manual mode, norms cannot be measured; a warning says so once.

    Args:
        norm_type: the ``p`` of the norm; ``inf`` for the largest magnitude.
        per_network: log the norm for each network too.
        per_parameter: log the norm for each parameter too.
        plug_id: unique id of the plugin.

    Example:
        >>> GradientNormMonitor(norm_type=float("inf")).plug_id
        'gradient-norm'
    """

    _internals: ClassVar[str] = "_has_warned _names _norm_type _norms _per_network _per_parameter"

    def __init__(
        self,
        norm_type: float = 2.0,
        *,
        per_network: bool = False,
        per_parameter: bool = False,
        plug_id: str = "gradient-norm",
    ) -> None:
        super().__init__(plug_id)
        self._norm_type = norm_type
        self._per_network = per_network
        self._per_parameter = per_parameter
        self.setup()

    def setup(self) -> None:
        """Start without a norm; a checkpoint restores it."""
        self._norms: dict[str, dict[str, Tensor]] = {}
        self._names: dict[Tensor, tuple[str, str]] = {}
        self._has_warned = False

    @asks_nothing
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Compute the norms of an update's gradients."""
        context = self.context
        optimizers = {**context.optimizers}
        found = (path for path, each in optimizers.items() if each is optimizer)
        path = next(found, type(optimizer).__name__)
        if not self._names.keys() >= set(parameters_of(optimizer)):
            networks = context.model.discovery.modules()
            self._names = name_parameters(networks, {**optimizers, path: optimizer})
        parts: dict[str, list[Tensor]] = {"": []}
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                network, name = self._names[parameter]
                gradient = parameter.grad.detach()
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                parts[""].append(gradient)
                if self._per_network:
                    parts.setdefault(network, []).append(gradient)
                if self._per_parameter:
                    parts[f"{network}.{name}"] = [gradient]
        with torch.no_grad():
            find_norm = context.engine.find_norm
            self._norms[path] = {
                place: find_norm(part, self._norm_type) for place, part in parts.items()
            }

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Log the last norms, if logging is due."""
        if not should_log or not self._norms:
            return
        is_one = len(self.context.optimizers) == 1
        norms = {
            "/".join(filter(None, ("grad_norm", "" if is_one else path, place))): norm
            for path, norms in self._norms.items()
            for place, norm in norms.items()
        }
        device = next(iter(norms.values())).device
        # One transfer for all: reading each number separately waits for the device each time.
        numbers = torch.stack([norm.to(device) for norm in norms.values()]).tolist()
        self.context.log(dict(zip(norms, numbers, strict=True)))

    @asks_nothing
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Warn once that manual steps cannot be measured."""
        if not self._norms and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "Plugin %r has nothing to log: train_step returns None, so the model steps its "
                "optimizers itself. Return the loss, or log the norm there.",
                self.plug_id,
            )

    def teardown(self) -> None:
        """Release the parameters."""
        self._names = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the newest norms: they may be due for logging before the next update."""
        return {"norms": {path: dict(norms) for path, norms in self._norms.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._norms = {path: dict(norms) for path, norms in state_dict["norms"].items()}

"""``GradientNormMonitor``: log the norms of gradients before clipping.

A norm is computed at every update, on the device of the gradients, and read only when logging is
due.
"""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.wrappers import BareNames
from helios.errors import ArgumentError
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)

_NAME = "grad_norm"


def _gradient_of(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@PLUGIN_REGISTRY.register
class GradientNormMonitor(Plugin):
    """Logs the norm of the gradients of each update, with the losses.

    Gradients are those of the whole accumulation window, averaged and not yet clipped. The scalars
    are named ``grad_norm``, or ``grad_norm/<optimizer>`` if the model has several optimizers, with
    ``/<network>`` and ``/<network>.<parameter>`` appended for networks and parameters; a parameter
    in no network is named by its optimizer, group and number. Several optimizers that are updated
    from one backward have a ``grad_norm`` together, too. If logging is due inside a window, the
    norm of the last update is logged.

    In manual mode, no norm can be measured, which is logged once.

    Args:
        norm_type: the ``p`` of the norm, above 0; ``inf`` for the largest magnitude.
        per_network: log the norm for each network too.
        per_parameter: log the norm for each parameter too.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: for an invalid norm (a ``ValueError``).

    Example:
        >>> GradientNormMonitor(norm_type=float("inf")).plug_id
        'gradient-norm'
    """

    _internals: ClassVar[str] = (
        "_has_logged _has_warned _norm_type _norms _paths _per_network _per_parameter _places"
    )

    def __init__(
        self,
        norm_type: float = 2.0,
        *,
        per_network: bool = False,
        per_parameter: bool = False,
        plug_id: str = "gradient-norm",
    ) -> None:
        super().__init__(plug_id)
        is_number = isinstance(norm_type, int | float) and not isinstance(norm_type, bool)
        if not is_number or math.isnan(norm_type) or norm_type <= 0:
            raise ArgumentError(
                f"GradientNormMonitor(norm_type=...) must be a number above 0, or inf, got "
                f"{norm_type!r}. Pass e.g. 2.0."
            )
        self._norm_type = float(norm_type)
        self._per_network = bool(per_network)
        self._per_parameter = bool(per_parameter)
        self._forget()

    def _forget(self) -> None:
        self._norms: dict[str, dict[str, Tensor]] = {}
        self._paths: dict[Optimizer, str] = {}
        self._places: dict[Tensor, tuple[str, str]] = {}
        self._has_logged = False
        self._has_warned = False

    def setup(self) -> None:
        """Start without a norm; a checkpoint restores it."""
        self._forget()

    @asks_nothing
    def on_optimizer_step_start(self, optimizer: Optimizer) -> None:
        """Compute the norms of an update's gradients."""
        if optimizer not in self._paths:
            self._learn_names(optimizer)
        path = self._paths[optimizer]
        found = {}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                gradient = _gradient_of(parameter)
                if gradient is not None:
                    found[parameter] = gradient
                    self._places.setdefault(parameter, (path, f"{number}.{place}"))
        engine = self.context.engine
        with torch.no_grad():
            self._norms[path] = self._measure(found)
            if len(engine._group) > 1 and optimizer is engine._group[0]:
                gradients = map(_gradient_of, engine._group_parameters)
                several = [gradient for gradient in gradients if gradient is not None]
                self._norms[""] = {"": engine.find_norm(several, self._norm_type)}

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Log the last norms, if logging is due."""
        if not should_log or not self._norms:
            return
        self._has_logged = True
        is_one = len(self.context.optimizers) == 1
        norms = {
            "/".join(filter(None, (_NAME, "" if is_one else path, place))): norm
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

    def on_training_end(self) -> None:
        """Warn if nothing was logged in the whole run."""
        if self._norms and not self._has_logged and self.context.start_step == 0:
            _LOGGER.warning(
                "Plugin %r has logged nothing: logging was never due. Set "
                "Trainer(print_frequency=...), or make it smaller.",
                self.plug_id,
            )

    def teardown(self) -> None:
        """Release the optimizers and parameters."""
        self._paths = {}
        self._places = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the newest norms: they may be due for logging before the next update."""
        return {"norms": {path: dict(norms) for path, norms in self._norms.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._norms = {path: dict(norms) for path, norms in state_dict["norms"].items()}

    def _measure(self, gradients: dict[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return norms by network or parameter; the key of the total is empty."""
        find_norm = self.context.engine.find_norm
        norms = {"": find_norm(list(gradients.values()), self._norm_type)}
        if self._per_network:
            parts: dict[str, list[Tensor]] = {}
            for parameter, gradient in gradients.items():
                parts.setdefault(self._places[parameter][0], []).append(gradient)
            norms |= {path: find_norm(part, self._norm_type) for path, part in parts.items()}
        for parameter, gradient in gradients.items() if self._per_parameter else ():
            place = ".".join(self._places[parameter])
            norms[place] = find_norm(gradient, self._norm_type)
        return norms

    def _learn_names(self, optimizer: Optimizer) -> None:
        """Find the names of optimizers, and the parameters of networks."""
        self._paths = {part: path for path, part in self.context.optimizers.items()}
        self._paths.setdefault(optimizer, type(optimizer).__name__)
        for path, network in self.context.model.discovery.modules().items():
            bare = BareNames(network)
            for name, parameter in network.named_parameters():
                self._places.setdefault(parameter, (path, bare.of(name)))

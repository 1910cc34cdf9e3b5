"""Scales losses so that gradients do not underflow in fp16, and skips an update on overflow.

The arithmetic is that of ``torch.amp.GradScaler``. Its ``step`` is not used, because a fused
optimizer would skip its update internally, without reporting it.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import parameters_of
from helios.engines.precision import ScalerOptions
from helios.errors import StateError, UsageError

_LOGGER = logging.getLogger(__name__)

_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")
_SAVED = frozenset((*_OPTIONS, "scale", "_growth_tracker"))


class _Stage(Enum):
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@final
class LossScaler:
    """The loss scale: the same for all optimizers, from the start of a window to its end.

    Args:
        options: how the scale is adjusted.
        device: the device of the losses.
    """

    def __init__(self, options: ScalerOptions, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._stages: dict[int, _Stage] = {}
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=options.init_scale,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
        )

    @property
    def value(self) -> float:
        """The current scale; reads it from the device."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss multiplied by the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, once per window.

        Raises:
            UsageError: after the optimizer's step of this window.
        """
        stage = self._stages.get(id(optimizer))
        if stage is _Stage.STEPPED:
            raise UsageError(
                f"{type(optimizer).__name__} has already been stepped in this window, and the loss "
                "scale of fp16 is adjusted between two windows. Call engine.close_window() after "
                "the last update of each window."
            )
        if stage is _Stage.UNSCALED:
            return
        self._stages[id(optimizer)] = _Stage.UNSCALED
        if any(part.grad is not None for part in parameters_of(optimizer)):
            # If this process has not scaled a loss yet, the scale is not on the device yet.
            self._scaler.scale(torch.zeros((), device=self._device))
            self._scaler.unscale_(optimizer)

    def is_finite(self, optimizer: Optimizer) -> bool:
        """Return whether the unscaled gradients are finite, and mark the optimizer as stepped."""
        self._stages[id(optimizer)] = _Stage.STEPPED
        found = self._findings.get(id(optimizer), {}).get("found_inf_per_device", {})
        return not any(map(bool, found.values()))

    @property
    def _findings(self) -> dict[int, dict[str, Any]]:
        """What ``unscale_`` has found, by optimizer; torch passes it to its own ``step`` only."""
        return self._scaler._per_optimizer_states  # noqa: SLF001

    def close_window(self) -> None:
        """Adjust the scale by what was found in the window, also if a hook skipped a step."""
        self._stages.clear()
        if self._findings:
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the windows since it last changed, and the options."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. Its options take precedence; differences are logged as a warning.

        Raises:
            StateError: if it is not a scaler's state.
        """
        if not isinstance(state_dict, dict) or set(state_dict) != _SAVED:
            raise StateError(
                "The scaler's state must be what torch.amp.GradScaler.state_dict() returns, got "
                f"{state_dict!r}. Load a state that an engine has saved."
            )
        changed = [
            f"{name} {state_dict[name]} (now {getattr(self._options, name)})"
            for name in _OPTIONS
            if state_dict[name] != getattr(self._options, name)
        ]
        if changed:
            _LOGGER.warning(
                "The scaler continues with the options of its checkpoint: %s.", ", ".join(changed)
            )
        self._scaler.load_state_dict(state_dict)

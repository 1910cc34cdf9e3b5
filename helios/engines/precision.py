"""The dtype in which the steps of a model compute, and the scale of losses in fp16.

A precision is a plain value. From it, the engine creates the autocast context of its steps, and the
loss scaler if the dtype has too few exponent bits for gradients: then gradients do not underflow,
and an update is skipped on overflow. The arithmetic is that of ``torch.amp.GradScaler``, but it
steps no optimizer: a fused one would skip its update internally, without reporting it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.utils import parameters_of
from helios.errors import ArgumentError, ArgumentTypeError, StateError, UsageError

_LOGGER = logging.getLogger(__name__)

_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")
_AS_IT_IS = nullcontext()
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclasses.dataclass(frozen=True)
class ScalerOptions:
    """Options of loss scaling in fp16, as in ``torch.amp.GradScaler``.

    Attributes:
        init_scale: the initial loss scale.
        growth_factor: multiplies it after ``growth_interval`` windows without an infinity.
        backoff_factor: multiplies it after a window with an infinity, whose update is skipped.
        growth_interval: a number of windows.

    Raises:
        ArgumentError: if a value is out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        rules = (
            ("init_scale", "a positive number", 0.0, math.inf),
            ("growth_factor", "a number above 1", 1.0, math.inf),
            ("backoff_factor", "a number between 0 and 1", 0.0, 1.0),
        )
        for name, rule, low, high in rules:
            value: object = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and low < float(value) < high):  # type: ignore[arg-type]
                self._refuse(name, rule)
        if type(self.growth_interval) is not int or self.growth_interval < 1:
            self._refuse("growth_interval", "a positive int")

    def _refuse(self, name: str, rule: str) -> None:
        default = getattr(type(self), name)
        raise ArgumentError(
            f"Precision.fp16({name}=...) must be {rule}, got {getattr(self, name)!r}. Omit it "
            f"for {default}."
        )


@final
@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of the arithmetic in a model's steps. Parameters keep their own dtype.

    Use ``Precision.FP32``, ``Precision.BF16`` or ``Precision.FP16``, or create one with
    :meth:`from_str` or :meth:`fp16`.

    Attributes:
        value: its name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        scaler: how losses are scaled; ``None`` if they are not.

    Raises:
        ArgumentError: if the name is unknown, or a scaler is given for a dtype that needs none.

    Example:
        >>> Precision.fp16(growth_interval=100).scaler.growth_interval
        100
        >>> Precision.from_str("bf16") == Precision.BF16
        True
    """

    FP32: ClassVar[Precision]
    BF16: ClassVar[Precision]
    FP16: ClassVar[Precision]

    value: str
    scaler: ScalerOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or self.value not in _DTYPES:
            raise ArgumentError(
                f'Precision must be "fp32", "bf16" or "fp16", got {self.value!r}. Use one of these.'
            )
        is_scaled = self.value == "fp16"
        if is_scaled and self.scaler is None:
            object.__setattr__(self, "scaler", ScalerOptions())
        if self.scaler is not None and not (is_scaled and type(self.scaler) is ScalerOptions):
            raise ArgumentError(
                f"Precision({self.value!r}, scaler=...) must be None, or ScalerOptions with "
                f'"fp16", got {self.scaler!r}. Use Precision.fp16(...).'
            )

    @classmethod
    def all(cls) -> tuple[Precision, ...]:
        """Return all precisions, with the default options."""
        return (cls.FP32, cls.BF16, cls.FP16)

    @classmethod
    def from_str(cls, name: str) -> Precision:
        """Return the precision named ``"fp32"``, ``"bf16"`` or ``"fp16"``.

        Raises:
            ArgumentError: for any other name (a ``ValueError``).
        """
        return next((known for known in cls.all() if known.value == name), None) or cls(name)

    @classmethod
    def fp16(
        cls,
        init_scale: float = ScalerOptions.init_scale,
        *,
        growth_factor: float = ScalerOptions.growth_factor,
        backoff_factor: float = ScalerOptions.backoff_factor,
        growth_interval: int = ScalerOptions.growth_interval,
    ) -> Precision:
        """Return half precision with the given loss scaling (see `ScalerOptions`).

        Raises:
            ArgumentError: if a value is out of range.
        """
        options = ScalerOptions(init_scale, growth_factor, backoff_factor, growth_interval)
        return cls("fp16", options)

    @property
    def casts(self) -> bool:
        """Whether the steps of a model compute in another dtype than that of their parameters."""
        return _DTYPES[self.value] is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which a model's steps run on a device."""
        dtype = _DTYPES[self.value]
        return _AS_IT_IS if dtype is None else torch.autocast(device.type, dtype=dtype)


def as_precision(precision: Any) -> Precision:
    """Return a precision that was given as an object or by name.

    Raises:
        ArgumentError: for a name that is unknown.
        ArgumentTypeError: for anything else.
    """
    if isinstance(precision, str):
        return Precision.from_str(precision)
    if not isinstance(precision, Precision):
        raise ArgumentTypeError(
            f"Engine(precision=...) must be a Precision, or its name, got {precision!r}. Pass e.g. "
            '"bf16".'
        )
    return precision


Precision.FP32 = Precision("fp32")
Precision.BF16 = Precision("bf16")
Precision.FP16 = Precision("fp16")


class _Gradients:
    """The gradients of an optimizer; ``GradScaler`` takes it for an optimizer.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.has_any = any(part.grad is not None for part in parameters_of(optimizer))
        # Unknown before somebody asks.
        self.are_finite: bool | None = None if self.has_any else True

    def step(self) -> bool:
        """Called if all gradients are finite."""
        return True


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
        self._unscaled: dict[int, _Gradients] = {}
        self._stepped: set[int] = set()
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
        if id(optimizer) in self._stepped:
            raise UsageError(
                f"{type(optimizer).__name__} has already been stepped in this window, and the loss "
                "scale of fp16 is adjusted between two windows. Call engine.close_window() after "
                "the last update of each window."
            )
        if id(optimizer) in self._unscaled:
            return
        gradients = self._unscaled[id(optimizer)] = _Gradients(optimizer)
        if gradients.has_any:
            # If this process has not scaled a loss yet, the scale is not on the device yet.
            self._scaler.scale(torch.zeros((), device=self._device))
            self._scaler.unscale_(cast("Optimizer", gradients))

    def is_finite(self, optimizer: Optimizer, group: Iterable[Optimizer] = ()) -> bool:
        """Return whether the unscaled gradients are finite, and mark the optimizer as stepped.

        Args:
            optimizer: the optimizer.
            group: the optimizers whose gradients are from the same backward, which also count.
        """
        self._stepped.add(id(optimizer))
        return all(self._has_finite(each) for each in (optimizer, *group))

    def _has_finite(self, optimizer: Optimizer) -> bool:
        gradients = self._unscaled.get(id(optimizer))
        if gradients is None:
            return True
        if gradients.are_finite is None:
            gradients.are_finite = bool(self._scaler.step(cast("Optimizer", gradients)))
        return gradients.are_finite

    def adjust(self) -> None:
        """Adjust the scale to the gradients of the window, also if a hook skipped a step."""
        if any(gradients.has_any for gradients in self._unscaled.values()):
            self._scaler.update()
        self._unscaled, self._stepped = {}, set()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the windows since it last changed, and the options."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. Its options take precedence; differences are logged as a warning.

        Raises:
            StateError: if it is not a scaler's state.
        """
        if not isinstance(state_dict, dict) or state_dict.keys() != self.state_dict().keys():
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

"""The type in which the steps of a model compute.

A precision is a plain value. The engine creates the autocast context of its steps from it, and the
loss scaler if its type has too few exponent bits for gradients.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, final

import torch

from helios.core.tracebacks import with_short_constructor
from helios.errors import ArgumentError, ArgumentTypeError

_AS_IT_IS = nullcontext()
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclasses.dataclass(frozen=True)
class ScalerOptions:
    """How losses are scaled in fp16, as in ``torch.amp.GradScaler``.

    Attributes:
        init_scale: the initial loss scale.
        growth_factor: multiplies it after ``growth_interval`` windows without an infinity.
        backoff_factor: multiplies it after a window with one, whose update is skipped.
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


@with_short_constructor
@final
@dataclasses.dataclass(frozen=True)
class Precision:
    """The type of the arithmetic within a model's steps. Parameters keep their own type.

    Use ``Precision.FP32``, ``Precision.BF16`` or ``Precision.FP16``, or create one with
    :meth:`from_str` or :meth:`fp16`.

    Attributes:
        value: its name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        scaler: how losses are scaled; ``None`` if they are not.

    Raises:
        ArgumentError: if the name is unknown, or a scaler is given for a type that needs none.

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
                f'Precision must be "fp32", "bf16" or "fp16", got {self.value!r}. Correct the name.'
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
        """Whether the steps of a model compute in a type other than that of their parameters."""
        return _DTYPES[self.value] is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which a model's steps run on a device."""
        dtype = _DTYPES[self.value]
        return _AS_IT_IS if dtype is None else torch.autocast(device.type, dtype=dtype)


def check_precision(precision: object) -> None:
    """Check the type of a precision.

    Raises:
        ArgumentTypeError: if it is not a :class:`Precision`.
    """
    if not isinstance(precision, Precision):
        raise ArgumentTypeError(
            f"Engine(precision=...) must be a Precision, got {precision!r}. Pass e.g. "
            'Precision.from_str("bf16").'
        )


Precision.FP32 = Precision("fp32")
Precision.BF16 = Precision("bf16")
Precision.FP16 = Precision("fp16")

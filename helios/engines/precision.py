"""In which type the steps of a model compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

from helios.errors import ArgumentError

_AS_IT_IS = nullcontext()


class Precision(Enum):
    """The type of the arithmetic inside a model's steps; parameters keep their own (DESIGN 6)."""

    FP32 = "fp32"
    BF16 = "bf16"

    @classmethod
    def from_str(cls, name: str) -> Precision:
        """Return the precision named ``"fp32"`` or ``"bf16"``.

        Raises:
            ArgumentError: for any other name (a ``ValueError``).
        """
        for precision in cls:
            if precision.value == name:
                return precision
        raise ArgumentError(f'Precision must be "fp32" or "bf16", got {name!r}. Correct the name.')

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which the steps of a model run on a device."""
        if self is Precision.FP32:
            return _AS_IT_IS
        return torch.autocast(device.type, dtype=torch.bfloat16)

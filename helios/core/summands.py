"""Numbers as sums take them: in float64, whatever type a model computes in.

A total of a coarse type stops growing: in bf16, 256 + 1 is 256, and fp16 ends at 65504.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_summand(value: Any) -> Any:
    """Return a number for a sum: tensors and NumPy's numbers in float64, all others as they are.

    A tensor stays on its device, without its graph; where the device lacks float64, as Apple's GPUs
    do, it is in float32.
    """
    if isinstance(value, Tensor):
        try:
            return _cast(value, torch.float64)
        except (TypeError, RuntimeError):
            return _cast(value, torch.float32)
    return float(value) if isinstance(value, np.number | np.bool_) else value


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A complex number stays one: it is refused where a real number is needed.
    return value.detach().to(torch.promote_types(value.dtype, dtype))

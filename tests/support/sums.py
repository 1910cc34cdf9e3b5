"""The order of summation as it is stated, written down apart from the code that it checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def by_definition(leaves: list[Any]) -> Any:
    """Add along the summation tree: n leaves split after the first ceil(n / 2)."""
    if len(leaves) == 1:
        return leaves[0]
    middle = math.ceil(len(leaves) / 2)
    return by_definition(leaves[:middle]) + by_definition(leaves[middle:])


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of the elements, in their order."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

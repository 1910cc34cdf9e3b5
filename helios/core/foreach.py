"""Changes many tensors at once: on a GPU, a few kernels do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def foreach(
    operation: Literal["add", "copy", "div", "mul"],
    tensors: Sequence[Tensor],
    other: Sequence[Tensor] | Tensor | float,
) -> None:
    """Do to each tensor, in place, what its method of that name does with a trailing underscore.

    Args:
        operation: the name.
        tensors: the tensors; there may be none.
        other: the other operands, one for each tensor or for all.
    """
    if tensors:
        # PyTorch has no public names for these.
        with torch.no_grad():
            getattr(torch, f"_foreach_{operation}_")(tensors, other)

"""Changes many tensors at once: on a GPU, a few kernels do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

# PyTorch documents them under these names: https://docs.pytorch.org/docs/stable/torch.html
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": torch._foreach_add_,
    "copy": torch._foreach_copy_,
    "div": torch._foreach_div_,
    "mul": torch._foreach_mul_,
}


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
        with torch.no_grad():
            _OPERATIONS[operation](tensors, other)

"""Tensors of which each process holds a shard, without importing what makes them."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor

_MODULE = "torch.distributed.tensor"


def is_sharded(value: object) -> TypeGuard[Any]:
    """Return whether a value is a tensor of which this process holds a shard."""
    # No such tensor exists before the module that defines it was imported.
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, which is a collective call; any other one itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()  # type: ignore[no-any-return]


def local_of(tensor: Tensor) -> Tensor:
    """Return the shard of this process; of a tensor that is not sharded, the tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001

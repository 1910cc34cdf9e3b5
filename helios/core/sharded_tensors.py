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


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor as one of which this process holds a shard; nothing is sent.

    Args:
        whole: the same on all processes.
        like: a tensor of the same shape; if it is not sharded, ``whole`` is returned.
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    distribute = sys.modules[_MODULE].distribute_tensor
    with torch.no_grad():
        found: Tensor = distribute(whole, like.device_mesh, like.placements, src_data_rank=None)
    return found


def local_of(tensor: Tensor) -> Tensor:
    """Return the shard of this process; of a tensor that is not sharded, the tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001

"""Tensors of which each process holds a shard, without importing what makes them."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from torch import Tensor

_MODULE = "torch.distributed.tensor"


def is_sharded(value: object) -> TypeGuard[Any]:
    """Return whether a value is a tensor of which this process holds a shard."""
    # No such tensor exists before the module that defines it was imported.
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the shard of this process; of a tensor that is not sharded, the tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001

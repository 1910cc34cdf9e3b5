"""Whether two values have the same bits: the one meaning of equality for what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from helios.core.memory import has_plain_bytes
from helios.core.sharded_tensors import is_sharded

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type as which elements are compared, by their size in bytes."""


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits.

    Tensors need the same dtype, shape and bytes of elements, on whatever devices, in whatever order
    in memory. So a NaN equals itself, and 0.0 does not equal -0.0; numbers and arrays likewise. Of
    sharded tensors, the shards of this process are compared, of other wrappers the tensors inside.
    Sparse and quantized tensors, and those without values, are the same only as one object.

    Lists, tuples and mappings are compared by their members, in order; anything else by type and
    ``==``.
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _are_same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ma.MaskedArray):
        masks = (np.ma.getmaskarray(each) for each in (one, other))
        return same(one.data, other.data) and same(*masks)
    if isinstance(one, np.ndarray | np.generic | float | complex):
        return _are_same_arrays(np.asarray(one), np.asarray(other))
    return bool(one == other)


def _are_same_tensors(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if is_traceable_wrapper_subclass(one) or is_traceable_wrapper_subclass(other):
        return (
            type(one) is type(other)
            and _cut_of(one) == _cut_of(other)
            and same(*map(_inside, (one, other)))
        )
    if not has_plain_bytes(one) or not has_plain_bytes(other):
        return False
    if _place(one) == _place(other):
        # Reading large networks takes its time.
        return True
    return torch.equal(_bits(one), _bits(other.to(one.device)))


def _cut_of(tensor: Any) -> Any:
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def _inside(tensor: Any) -> list[Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    marks = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.stride(), *marks


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGERS[plain.element_size()])


def _are_same_arrays(one: Any, other: Any) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dtype.hasobject:
        return same(one.tolist(), other.tolist())
    return bool(one.tobytes() == other.tobytes())

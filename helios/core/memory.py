"""The bytes of arrays and tensors: which memory they share, and whether two values have the same.

This defines equality for saved values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, Any]
Extent: TypeAlias = tuple[int, int]


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none (sparse, lazy, empty)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0


def has_plain_bytes(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in a storage that can be read as bytes."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and not tensor.is_meta and not tensor.is_nested


def root_of(array: Array) -> Any:
    """Return the array that owns the memory of a view, or the object that NumPy got it from."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base


def address_of(part: Array | Tensor) -> int:
    """Return the address of the first element of an array or a dense tensor."""
    if isinstance(part, Tensor):
        return part.data_ptr()
    return int(part.__array_interface__["data"][0])


def span_of(part: Array | Tensor) -> Extent:
    """Return the begin and end addresses of the elements of an array or a dense tensor.

    Example:
        >>> begin, end = span_of(torch.zeros(8)[1:7:2])
        >>> end - begin
        20
    """
    first = address_of(part)
    if not all(part.shape):
        return first, first
    if isinstance(part, Tensor):
        steps = tuple(step * part.itemsize for step in part.stride())
    else:
        steps = part.strides
    reaches = [(length - 1) * step for length, step in zip(part.shape, steps, strict=True)]
    begin = first + sum(each for each in reaches if each < 0)
    return begin, first + sum(each for each in reaches if each > 0) + part.itemsize


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of a dense tensor share one address."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return any(step == 0 and length > 1 for length, step in steps)


def fills_its_reach(tensor: Tensor) -> bool:
    """Return whether a dense tensor covers all bytes between its first and its last element.

    Example:
        >>> fills_its_reach(torch.zeros(2, 3).t()), fills_its_reach(torch.zeros(8)[::2])
        (True, False)
    """
    begin, end = span_of(tensor)
    is_packed = end - begin == tensor.nbytes and not is_expanded(tensor)
    return tensor.is_contiguous() or is_packed


def memory_in(extent: Extent, owners: Sequence[Array | Tensor]) -> Tensor:
    """Return memory as a tensor of bytes, without a copy.

    Args:
        extent: begin and end address.
        owners: the arrays and tensors that own the memory.
    """
    begin, end = extent
    for part in owners:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            first = storage.data_ptr()
            if first <= begin and end <= first + storage.nbytes():
                return tensor_on(storage, torch.uint8, (end - begin,), (1,), begin - first)
    form = {"version": 3, "shape": (end - begin,), "typestr": "|u1", "data": (begin, False)}
    # NumPy keeps it, and so the owners, alive.
    lent: Any = SimpleNamespace(__array_interface__=form, owners=owners)
    return torch.from_numpy(np.asarray(lent))


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes, which covers views and overlaps once."""
    storage = tensor.untyped_storage()
    return tensor_on(storage, torch.uint8, (storage.nbytes(),), (1,), 0)


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> Tensor:
    """Return a tensor that is a view of a storage, with strides and offset in elements.

    Raises:
        RuntimeError: if it would exceed the storage.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, tuple(shape), tuple(strides))


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits.

    Dense tensors need the same dtype, shape and bytes of elements, on any devices and in any order
    in memory. So a NaN equals itself, and 0.0 does not equal -0.0; numbers and arrays likewise.
    Lists, tuples and mappings are compared by their members, in order; anything else by type and
    ``==``.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and torch.equal(_bytes_of(one), _bytes_of(other).to(one.device))
    if isinstance(one, np.ndarray | np.generic | float | complex):
        left, right = np.asarray(one), np.asarray(other)
        is_alike = (left.dtype, left.shape) == (right.dtype, right.shape)
        return is_alike and left.tobytes() == right.tobytes()
    return bool(one == other)


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

"""The bytes of arrays and tensors: which memory they share, and whether two values have the same.

This is the one meaning of equality for what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from helios.core.sharded_tensors import is_sharded

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


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def extent_of(part: Array | Tensor) -> Extent:
    """Return the begin and end addresses of an array, or of a tensor's storage."""
    if isinstance(part, Tensor):
        begin = storage_of(part)
        return begin, begin + (part.untyped_storage().nbytes() if begin else 0)
    begin = end = address_of(part)
    if part.size == 0:
        return begin, begin
    for length, stride in zip(part.shape, part.strides, strict=True):
        if stride < 0:
            begin += (length - 1) * stride
        else:
            end += (length - 1) * stride
    return begin, end + part.itemsize


def span_of(part: Array | Tensor) -> Extent:
    """Return the begin and end addresses of the elements of an array or a dense tensor.

    Example:
        >>> begin, end = span_of(torch.zeros(8)[1:7:2])
        >>> end - begin
        20
    """
    if not isinstance(part, Tensor):
        return extent_of(part)
    begin = part.data_ptr()
    if not part.numel():
        return begin, begin
    steps = zip(part.shape, part.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1
    return begin, begin + reach * part.element_size()


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
    if tensor.is_contiguous():
        return True
    size = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and step != size:
            return False
        size *= length
    return True


class _Lent:
    """Exposes memory to NumPy as writable bytes, and keeps its owners alive."""

    def __init__(self, extent: Extent, owners: Sequence[Array | Tensor]) -> None:
        begin, end = extent
        self.owners = owners
        self.__array_interface__ = {
            "version": 3,
            "shape": (end - begin,),
            "typestr": "|u1",
            "data": (begin, False),
        }


def bytes_in(extent: Extent, owners: Sequence[Array | Tensor]) -> Tensor:
    """Return the memory of an extent as a tensor of bytes, without a copy.

    Args:
        extent: begin and end address on the host.
        owners: the arrays and tensors that own the memory.
    """
    return torch.from_numpy(np.asarray(_Lent(extent, owners)))


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes, which covers views and overlaps once."""
    storage = tensor.untyped_storage()
    return tensor_on(storage, torch.uint8, (storage.nbytes(),), (1,), 0)


def array_on(
    memory: Any, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int], offset: int
) -> Array:
    """Return an array that is a view of a buffer.

    Raises:
        ValueError: if it would exceed the buffer.
    """
    array: Array = np.ndarray(tuple(shape), dtype, memory, offset, tuple(strides))
    return array


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> Tensor:
    """Return a tensor that is a view of a storage.

    Args:
        storage: the storage.
        dtype: type of the elements.
        shape: shape of the tensor.
        strides: in elements.
        offset: in elements.

    Raises:
        RuntimeError: if it would exceed the storage.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, tuple(shape), tuple(strides))


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

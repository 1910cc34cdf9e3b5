"""Locates tensors and arrays, so that shared memory is written once.

One that shares no memory is written by value. Of several that overlap, the first has the memory,
and the others are places in it; or all are places in a neighbour that is saved elsewhere, such as a
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from helios.core.memory import (
    Array,
    Extent,
    address_of,
    has_plain_bytes,
    is_expanded,
    memory_in,
    span_of,
    tensor_on,
)
from helios.errors import StateError
from helios.storage.type_converters import INLINE_BYTES, describe, dtype_of

if TYPE_CHECKING:
    from helios.storage.codes import Coder

_HOST = torch.device("cpu")


class View(NamedTuple):
    """A tensor or array in memory.

    Attributes:
        path: where it was met.
        part: the tensor or array.
        code: what says where it lies.
    """

    path: str
    part: Any
    code: dict[str, Any]


def place_views(coder: Coder) -> None:
    """Complete the codes of all views: memory that they share is written once."""
    views = [*coder.views.values()]
    if not views:
        return
    own = {id(view.part) for view in views}
    homes = [
        (name, part)
        for name, part in coder.neighbours().items()
        if id(part) not in own and (not isinstance(part, Tensor) or has_plain_bytes(part))
    ]
    shared: set[int] = set()
    if homes or any(isinstance(v.part, Tensor) or v.part.base is not None for v in views):
        spans = [span_of(part) for _, part in homes] + [span_of(view.part) for view in views]
        devices = [_device_of(part) for _, part in homes] + [_device_of(v.part) for v in views]
        for device in set(devices):
            numbers = [number for number, each in enumerate(devices) if each == device]
            for members in overlapping(numbers, spans):
                together = [views[n - len(homes)] for n in members if n >= len(homes)]
                shared.update(members)
                if together:
                    _place_together(coder, members, homes, views, spans)
    for number, view in enumerate(views, len(homes)):
        if number not in shared:
            _place_alone(coder, view)


def overlapping(numbers: Sequence[int], spans: Sequence[Extent]) -> list[list[int]]:
    """Return the numbers of spans that overlap others, in groups.

    Example:
        >>> overlapping([0, 1, 2, 3], [(0, 4), (8, 9), (2, 6), (6, 7)])
        [[0, 2]]
    """
    found = np.array([n for n in numbers if spans[n][0] < spans[n][1]], np.int64)
    if len(found) < 2:
        return []
    begins, ends = np.array([spans[number] for number in found], np.int64).T
    order = np.argsort(begins, kind="stable")
    reached = np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(begins[order][1:] >= reached[:-1]) + 1
    if len(starts) + 1 == len(found):
        return []
    groups = np.split(found[order], starts)
    return [sorted(map(int, group)) for group in groups if len(group) > 1]


def _device_of(part: Array | Tensor) -> torch.device:
    return part.device if isinstance(part, Tensor) else _HOST


def _place_together(
    coder: Coder,
    members: Sequence[int],
    homes: Sequence[tuple[str, Any]],
    views: Sequence[View],
    spans: Sequence[Extent],
) -> None:
    """Place what overlaps: in a neighbour if it fits there, otherwise in memory of its own."""
    around = [number for number in members if number < len(homes)]
    free: list[View] = []
    extents: list[Extent] = []
    for number in members[len(around) :]:
        view, (begin, end) = views[number - len(homes)], spans[number]
        home = next((n for n in around if spans[n][0] <= begin and end <= spans[n][1]), None)
        if home is not None:
            view.code.update(_geometry(view, spans[home][0]), of=homes[home][0])
            continue
        free.append(view)
        extents.append((begin, end))
        for other in around:
            if spans[other][0] < end and begin < spans[other][1]:
                where = spans[other][0] - begin, spans[other][1] - begin
                coder.overlaps[view.path] = (homes[other][0], where)
    if not free:
        return
    owners = [view.part for view in free]
    begin, end = min(extents)[0], max(extent[1] for extent in extents)
    for part in owners:
        if isinstance(part, Tensor):
            # Elements of every type keep their alignment.
            storage = part.untyped_storage().data_ptr()
            begin -= (begin - storage) % 16 if begin >= storage else 0
            break
    for view in free:
        view.code.update(_geometry(view, begin), of=free[0].path)
    del free[0].code["of"]
    memory = memory_in((begin, end), owners)
    free[0].code["memory"] = _packed(coder, free[0].path, memory)


def _place_alone(coder: Coder, view: View) -> None:
    part, code = view.part, view.code
    if isinstance(part, Tensor) and not is_expanded(part):
        code["value"] = part.detach()
        if not part.is_cpu:
            code["device"] = part.device.type
        coder.tensors[view.path] = [code["value"]]
        return
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous and part.nbytes < int(np.subtract(*span_of(part)[::-1])):
            # Without the gaps between its elements.
            compact = part.copy("K")
            compact.flags.writeable = part.flags.writeable
            part = compact
        if part.flags.c_contiguous and part.nbytes <= INLINE_BYTES:
            code.update(_form(part), memory=part.tobytes().decode("latin-1"))
            return
    span = span_of(part)
    code.update(_geometry(View(view.path, part, code), span[0]))
    if isinstance(part, np.ndarray) and part.flags.c_contiguous:
        del code["strides"], code["offset"]
    code["memory"] = _packed(coder, view.path, memory_in(span, [part]))


def _geometry(view: View, begin: int) -> dict[str, Any]:
    part, offset = view.part, address_of(view.part) - begin
    if isinstance(part, Tensor):
        if offset % part.element_size():
            raise StateError(
                f"{view.path} cannot be saved: it shares memory with an array at an address that "
                "is not a multiple of its element size. Copy one of them."
            )
        strides = [*part.stride()]
    else:
        strides = [*part.strides]
    return _form(part) | {"strides": strides, "offset": offset}


def _form(part: Array | Tensor) -> dict[str, Any]:
    if isinstance(part, Tensor):
        found = {"dtype": part.dtype, "shape": [*part.shape]}
        return found if part.is_cpu else found | {"device": part.device.type}
    found = {"dtype": describe(part.dtype), "shape": [*part.shape]}
    return found if part.flags.writeable else found | {"read-only": True}


def _packed(coder: Coder, path: str, memory: Tensor) -> Any:
    if memory.is_cpu and memory.numel() <= INLINE_BYTES:
        return memory.numpy().tobytes().decode("latin-1")
    coder.tensors[path] = [memory]
    return memory


def unpacked(memory: Any) -> bytearray | Tensor:
    """Return the memory of a code, as bytes on the host or a tensor of bytes."""
    if isinstance(memory, str):
        return bytearray(memory, "latin-1")
    if type(memory) is not Tensor or memory.dtype != torch.uint8 or memory.dim() != 1:
        raise StateError("The memory of a tensor or array must be bytes.")
    return memory


def as_tensor(memory: bytearray | Tensor) -> Tensor:
    """Return bytes as a tensor, without a copy."""
    if isinstance(memory, Tensor):
        return memory
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def lay(code: Mapping[str, Any], memory: bytearray | Tensor) -> Any:
    """Return the tensor or array that a code describes, as a view of memory.

    Args:
        code: as :func:`place_views` has completed it.
        memory: the bytes.

    Raises:
        Exception: if it would exceed the memory.
    """
    dtype, shape = code["dtype"], tuple(code["shape"])
    if not isinstance(dtype, torch.dtype):
        kind = dtype_of(dtype)
        buffer = memory.numpy() if isinstance(memory, Tensor) else memory
        offset, strides = code.get("offset", 0), code.get("strides")
        array: Array = np.ndarray(shape, kind, buffer, offset, strides)
        array.flags.writeable = "read-only" not in code
        return array
    whole = as_tensor(memory)
    strides, offset = tuple(code["strides"]), code["offset"]
    reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
    end = offset + reach * dtype.itemsize if all(shape) else offset
    first = whole.storage_offset() + offset
    if min((0, offset, *shape, *strides)) < 0 or end > len(whole) or first % dtype.itemsize:
        raise ValueError("a tensor must lie in its memory")
    return tensor_on(whole.untyped_storage(), dtype, shape, strides, first // dtype.itemsize)

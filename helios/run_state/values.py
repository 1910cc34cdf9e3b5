"""Which values a checkpoint can hold, and digests that tell whether training has changed one.

A digest is taken of pickle's bytes, in which whatever is saved elsewhere is only named: networks,
optimizers and their parameters may train without changing what refers to them. What cannot be
pickled counts by identity.
"""

from __future__ import annotations

import copyreg
import datetime
import io
import pickle
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from itertools import chain, count
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LIMIT = 1 << 20
"""Bytes of plain values that a checkpoint holds; more belongs into a module or an own object."""

ATOMS: frozenset[type] = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, range, slice),
        *(Decimal, Fraction, UUID, ZoneInfo),
        *(datetime.date, datetime.timedelta, datetime.timezone),
        *(PosixPath, WindowsPath, PurePosixPath, PureWindowsPath),
        *(torch.dtype, torch.device, torch.Size),
    )
)
"""Types of values without members; exact types, since a subclass may carry attributes."""

_MEMBERS_OF: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((list, tuple, deque, set, frozenset), iter),
    **dict.fromkeys((dict, defaultdict, Counter, OrderedDict), lambda v: chain(*v.items())),
    np.ndarray: lambda v: v.reshape(-1).tolist() if v.dtype == object else (),
}
_HASHED = (set, frozenset)
_IMMUTABLE = (tuple, frozenset)
_FACTORIES = (
    *(None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
    *(OrderedDict, Counter, deque),
)
# Code never changes; what data sets and loaders go through is the data's own state.
_OPAQUE = (type, FunctionType, ModuleType, Dataset, DataLoader)


class Surroundings(Protocol):
    """What lies around a value and is saved on its own account."""

    def name_of(self, value: object) -> str | None:
        """Return the name under which an object is saved elsewhere."""
        ...

    def name_of_storage(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer whose storage a tensor shares."""
        ...


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none (sparse, lazy, empty)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0


def _has_plain_bytes(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) is Tensor and is_dense and tensor.device.type != "meta"


def _is_single(value: Any) -> bool:
    """Return whether a value without members, of a type with variants, is plain."""
    if type(value) in (datetime.datetime, datetime.time):
        return type(value.tzinfo) in ATOMS
    return isinstance(value, Enum | np.generic)


def plain_parts(value: Any, surroundings: Surroundings) -> set[int] | None:
    """Return the addresses of the mutable parts of a plain value; ``None`` if it is not plain.

    Two values that have a part in common are aliases of each other.
    """
    parts: set[int] = set()
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            if not _is_plain_tensor(part, surroundings):
                return None
            parts.add(storage_of(part) or id(part))
        elif kind in _MEMBERS_OF:
            if not _is_plain_container(part):
                return None
            waiting += () if _is_flat(part) else _MEMBERS_OF[kind](part)
            if kind not in _IMMUTABLE:
                parts.add(id(part))
        elif not _is_single(part):
            return None
    return parts


def _is_plain_tensor(tensor: Tensor, surroundings: Surroundings) -> bool:
    # A parameter would come back as a tensor: it is saved on its own account, or not at all.
    if not tensor.is_leaf or not _has_plain_bytes(tensor):
        return False
    return surroundings.name_of_storage(tensor) is None


def _is_plain_container(value: Any) -> bool:
    # A tensor in a set is found again by identity only, which no checkpoint keeps.
    if type(value) in _HASHED:
        return not any(isinstance(member, Tensor) for member in value)
    if type(value) is np.ndarray:
        return value.dtype == object or not value.dtype.hasobject
    return type(value) is not defaultdict or value.default_factory in _FACTORIES


def _is_flat(value: Any) -> bool:
    return ATOMS.issuperset(map(type, _MEMBERS_OF[type(value)](value)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a plain value in a fixed order, each once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            yield part
        elif type(part) in _MEMBERS_OF and not _is_flat(part):
            waiting += reversed(list(_MEMBERS_OF[type(part)](part)))


class Digest(NamedTuple):
    """What is remembered of a value.

    Attributes:
        is_plain: whether it was a plain value.
        mark: hash of its types and bytes.
        size: its size in bytes, about.
    """

    is_plain: bool
    mark: bytes
    size: int


@final
class Identities:
    """Numbers for objects that are told apart by identity; no number is given twice.

    An address alone would not do: the next object may be built where the last one was.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._counter = count()

    def number(self, value: object) -> int:
        """Return the number of an object, a new one at its first sight.

        An iterator gets a new one at every sight: nothing tells how far it has come.
        """
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            return next(self._counter)
        entry = self._numbers.get(id(value))
        if entry is None or entry[0]() is not value:
            entry = (_refer_to(value), next(self._counter))
            self._numbers[id(value)] = entry
        return entry[1]


def _refer_to(value: object) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class _Reference:
    """Stands in a digest for an object that is only named there."""


class _Sink:
    """A file that keeps the hash and the size of what is written to it."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)
        self.size = 0

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        # Large arrays come as they lie in memory, which may be in columns.
        flat = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
        self.hash.update(flat)
        self.size += flat.nbytes
        return flat.nbytes


class _Pickler(pickle.Pickler):
    """Writes what a digest is taken of. Nothing ever reads it back."""

    def __init__(
        self, sink: _Sink, surroundings: Surroundings, identities: Identities, *, has_memo: bool
    ) -> None:
        super().__init__(sink, protocol=5)
        # Without pickle's memo, equal values have equal bytes whatever parts of them are shared.
        self.fast = not has_memo
        self._sink = sink
        self._surroundings = surroundings
        self._identities = identities

    def reducer_override(self, value: Any) -> Any:
        if value is _Reference:
            return NotImplemented
        if (name := self._surroundings.name_of(value)) is not None:
            return _Reference, ("saved as", name)
        if isinstance(value, Tensor):
            return _Reference, self._describe(value)
        return self._reduce(value) or (_Reference, ("number", self._identities.number(value)))

    def _reduce(self, value: Any) -> tuple[Any, ...] | None:
        """Return how an object would be pickled; ``None`` if it cannot be."""
        if isinstance(value, _OPAQUE):
            return None
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(5) if reducer is None else reducer(value)
        except Exception:  # user code: an object that refuses counts by identity
            return None
        return reduced if isinstance(reduced, tuple) else None

    def _describe(self, tensor: Tensor) -> tuple[Any, ...]:
        head: tuple[Any, ...] = (str(tensor.dtype), tuple(tensor.shape))
        if (name := self._surroundings.name_of_storage(tensor)) is not None:
            return "shares", name, tensor.storage_offset(), tensor.stride(), *head
        head = (*head, tensor.device.type, tensor.requires_grad, tensor.is_leaf)
        if not _has_plain_bytes(tensor) or tensor.nbytes > LIMIT:
            # Too large to be saved anyway: its version tells of a change without reading it.
            self._sink.size += LIMIT + 1
            version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
            return "tensor", self._identities.number(tensor), version, *head
        return "bytes", _bytes_of(tensor), *head


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def take_digest(
    value: Any, surroundings: Surroundings, identities: Identities, *, is_plain: bool
) -> Digest:
    """Digest a value: types, order and bytes count; what is saved elsewhere counts by its name.

    Args:
        value: the value.
        surroundings: what is saved elsewhere.
        identities: numbers for what cannot be pickled.
        is_plain: whether :func:`plain_parts` found it plain.
    """
    # Objects often refer to themselves in a circle, which takes a memo; plain values hardly ever.
    for has_memo in (False, True) if is_plain else (True,):
        sink = _Sink()
        try:
            _Pickler(sink, surroundings, identities, has_memo=has_memo).dump(value)
        except Exception:  # user code, or a value that is nested too deeply
            continue
        return Digest(is_plain, sink.hash.digest(), sink.size)
    return Digest(is_plain=False, mark=b"%d" % identities.number(value), size=0)

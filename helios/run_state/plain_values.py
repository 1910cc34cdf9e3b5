"""Defines which values a checkpoint can hold, what they consist of, and what they refer to."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import io
import weakref
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import cache, cached_property, reduce
from itertools import chain
from operator import or_
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MemberDescriptorType
from typing import Any, NamedTuple, Protocol, cast, final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor

from helios.core.memory import address_of, extent_of, is_foreign, root_of, storage_of
from helios.storage.user_types import NamedFields

LIMIT = 64 << 20
"""Bytes of plain values that a checkpoint holds by default."""

ATOMS: frozenset[type] = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, range, slice),
        *(Decimal, Fraction, UUID, ZoneInfo),
        *(datetime.date, datetime.timedelta, datetime.timezone),
        *(PosixPath, WindowsPath, PurePosixPath, PureWindowsPath),
        *(torch.dtype, torch.device, torch.Size),
    )
)
"""Types of values without members; exact types, since a subclass may have attributes."""

_WITH_TUPLES = ATOMS | {tuple}

MEMBERS_OF: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((list, tuple, deque, set, frozenset), iter),
    **dict.fromkeys((dict, defaultdict, Counter, OrderedDict), lambda v: chain(*v.items())),
    np.ndarray: lambda v: v.reshape(-1).tolist() if v.dtype == object else (),
    NamedFields: lambda v: v.fields.values(),
}
SCALARS: frozenset[type] = frozenset({*np.sctypeDict.values()} - {np.object_})
FACTORIES = (
    *(None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
    *(OrderedDict, Counter, deque),
)


class Target(NamedTuple):
    """A position in memory that is saved elsewhere.

    Attributes:
        name: the name of the parameter, buffer or tensor that is saved.
        offset: bytes from its first element.
    """

    name: str
    offset: int


@final
class Storages:
    """The parameters, buffers and other tensors that are saved elsewhere.

    Args:
        named: all of them, by name; a shared storage has the name of the first one.
        others: the names of those that other owners save.
    """

    def __init__(self, named: Mapping[str, Tensor], others: Collection[str] = ()) -> None:
        self._named = named
        self.others = others

    @cached_property
    def _by_address(self) -> dict[int, str]:
        names = {storage_of(self._named[name]): name for name in reversed([*self._named])}
        names.pop(0, None)
        return names

    @cached_property
    def _on_host(self) -> list[int]:
        named = self._named
        return sorted(a for a, name in self._by_address.items() if named[name].device.type == "cpu")

    @cached_property
    def _has_foreign(self) -> bool:
        return any(is_foreign(self._named[name]) for name in self._by_address.values())

    @cached_property
    def _by_identity(self) -> dict[int, str]:
        return {id(self._named[name]): name for name in reversed([*self._named])}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that is one of them, not one that shares its storage."""
        return self._by_identity.get(id(tensor))

    def tensor(self, name: str) -> Tensor | None:
        """Return the tensor of a name; ``None`` if there is none."""
        return self._named.get(name)

    def first_in(self, part: Tensor) -> Tensor | None:
        """Return the tensor that names the storage of a tensor, or ``None``."""
        return self._named.get(self._by_address.get(storage_of(part), ""))

    def find(self, part: Tensor | np.ndarray[Any, Any]) -> Target | None:
        """Return the position of a tensor or array in their memory, or ``None``."""
        if isinstance(part, Tensor):
            name = self._by_address.get(storage_of(part))
            if name is None:
                return None
            return Target(name, part.data_ptr() - self._named[name].data_ptr())
        if not self._named or not part.size or not self._may_share(part):
            return None
        begin, end = extent_of(part)
        number = bisect_right(self._on_host, begin) - 1
        if number < 0 or end > self._end_of(number):
            return None
        name = self._by_address[self._on_host[number]]
        return Target(name, address_of(part) - self._named[name].data_ptr())

    def find_within(self, array: np.ndarray[Any, Any]) -> str | None:
        """Return the name of one that is within an array's memory, or ``None``."""
        if not self._named or not array.size or not self._may_share(array):
            return None
        begin, end = extent_of(array)
        number = max(bisect_right(self._on_host, begin) - 1, 0)
        for near in range(number, len(self._on_host)):
            if self._on_host[near] >= end:
                break
            if begin < self._end_of(near):
                return self._by_address[self._on_host[near]]
        return None

    def _end_of(self, number: int) -> int:
        begin = self._on_host[number]
        return begin + self._named[self._by_address[begin]].untyped_storage().nbytes()

    def _may_share(self, array: np.ndarray[Any, Any]) -> bool:
        # Memory is NumPy's own, unless torch shares it with an array in either direction.
        is_own = array.base is None or isinstance(root_of(array), np.ndarray | bytes)
        return self._has_foreign or not is_own


class Surroundings(Protocol):
    """The objects around a value that are saved elsewhere."""

    def name_of(self, value: object) -> str | None:
        """Return the name under which an object is saved elsewhere."""
        ...

    @property
    def storages(self) -> Storages:
        """The tensors that are saved elsewhere."""
        ...


def is_single(value: Any) -> bool:
    """Return whether a value without members is plain, if its type has variants."""
    return type(value) in (datetime.datetime, datetime.time) and type(value.tzinfo) in ATOMS


def flags_in(member: Flag) -> list[str] | None:
    """Return the names of the set flags, or ``None`` if they do not describe the value fully."""
    kind = type(member)
    names = [part.name for part in kind if part.value and part in member]
    again = reduce(or_, (kind[name] for name in names if name), kind(0))
    return [str(name) for name in names] if again == member else None


def fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass whose instances hold nothing else; ``None`` for others.

    A dataclass that derives from another type, such as dict or Tensor, holds more than its fields;
    and a field that the class itself manages cannot be set without running code.
    """
    return _fields_of(cast("Hashable", kind))


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind) or issubclass(kind, Enum):
        return None
    try:
        object.__new__(kind)
    except TypeError:
        return None
    names = tuple(field.name for field in dataclasses.fields(kind))
    for base in kind.__mro__:
        for name, guard in vars(base).items():
            is_slot = isinstance(guard, MemberDescriptorType)
            if is_slot != (name in names) and inspect.isdatadescriptor(guard):
                return None
    return names


def field_values(record: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """Return the fields of a dataclass instance; ``None`` if it lacks one, or holds more."""
    try:
        contents = {name: object.__getattribute__(record, name) for name in names}
    except AttributeError:
        return None
    try:
        attributes = vars(record)
    except TypeError:
        return contents
    return contents if attributes.keys() <= contents.keys() else None


def members_of(part: Any) -> Iterable[Any]:
    """Return the members of a part of a plain value."""
    kind = type(part)
    if kind in MEMBERS_OF:
        members = MEMBERS_OF[kind]
        return () if are_atoms(members(part)) else members(part)
    names = None if kind in ATOMS else fields_of(kind)
    return () if names is None else [object.__getattribute__(part, name) for name in names]


def are_atoms(values: Iterable[Any]) -> bool:
    """Return whether no value has members."""
    return ATOMS.issuperset(map(type, values))


def is_flat(value: Any) -> bool:
    """Return whether no value in a list, tuple or dict has members; keys may have them."""
    return are_atoms(value.values() if isinstance(value, dict) else value)


def are_shallow(tables: Iterable[Iterable[Any]]) -> bool:
    """Return whether containers hold only atoms and tuples of atoms."""
    kinds: set[type] = set()
    for members in tables:
        kinds.update(map(type, members))
    if kinds <= ATOMS:
        return True
    if not kinds <= _WITH_TUPLES:
        return False
    tuples = (part for members in tables for part in members if type(part) is tuple)
    return are_atoms(chain.from_iterable(tuples))


def parts_in(value: Any) -> Iterator[Any]:
    """Yield the parts of a plain value in a fixed order, each once, without those of flat ones."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += reversed(list(members_of(part)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a plain value in a fixed order, each once."""
    return (part for part in parts_in(value) if isinstance(part, Tensor))


@final
class Identities:
    """Numbers for objects that are compared by identity. No number is given twice.

    An address alone is not enough: a new object may have the address of a deleted one.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._given = 0  # Not an itertools.count, which Python 3.14 can neither copy nor pickle.

    def number(self, value: object) -> int:
        """Return the number of an object, which is new if the object is.

        An iterator gets a new one in each call, because its position is unknown.
        """
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            return self._give()
        entry = self._numbers.get(id(value))
        if entry is None or entry[0]() is not value:
            entry = (_refer_to(value), self._give())
            self._numbers[id(value)] = entry
        return entry[1]

    def _give(self) -> int:
        self._given += 1
        return self._given


def _refer_to(value: object) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value

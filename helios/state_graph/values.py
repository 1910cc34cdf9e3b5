"""Defines which values a checkpoint can hold, and what they consist of."""

from __future__ import annotations

import datetime
import io
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import cache, partial, reduce
from operator import or_
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, cast, final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

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

SCALARS: frozenset[type] = frozenset({*np.sctypeDict.values()} - {np.object_})
CONTAINERS = frozenset((list, dict, OrderedDict, defaultdict, Counter, deque, set, frozenset))
LEAVES = ATOMS | SCALARS | {np.ndarray}
"""Types whose values hold no objects, unless an array does."""

FACTORIES = (
    *(None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
    *(OrderedDict, Counter, deque),
)

RESOURCES = frozenset(
    (
        *("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
        *("_asyncio", "socket", "_socket", "subprocess", "io", "_io", "sqlite3", "_sqlite3"),
    )
)
"""Modules whose objects use resources outside the process's memory, or belong to other threads."""

OUTSIDE = RESOURCES | {
    *("logging", "weakref", "_weakref", "ctypes", "_ctypes", "importlib", "inspect"),
}
"""Modules whose objects are no values."""

_MUTABLE = (OrderedDict, dict, list, bytearray, set, deque)
_CONTAINERS = (*_MUTABLE, tuple, frozenset)
WITHOUT_ATTRIBUTES = frozenset((dict, list, set, deque, tuple, frozenset))
"""Types of containers that hold nothing but their members."""


def are_atoms(values: Iterable[Any]) -> bool:
    """Return whether no value has members."""
    return ATOMS.issuperset(map(type, values))


def is_single(value: Any) -> bool:
    """Return whether a value without members is plain, if its type has variants."""
    return type(value) in (datetime.datetime, datetime.time) and type(value.tzinfo) in ATOMS


def flags_in(member: Flag) -> list[str] | None:
    """Return the names of the set flags, or ``None`` if they do not describe the value fully."""
    kind = type(member)
    names = [part.name for part in kind if part.value and part in member]
    again = reduce(or_, (kind[name] for name in names if name), kind(0))
    return [str(name) for name in names] if again == member else None


def is_plain_object(kind: type) -> bool:
    """Return whether instances of a class consist of attributes alone.

    These can be read and set without running a method of the class. Samplers, data sets and
    iterators are not among them: what they hold may have been read ahead.
    """
    return _is_plain_object(cast("Hashable", kind))


@cache
def _is_plain_object(kind: type) -> bool:
    if issubclass(kind, Dataset | DataLoader | Sampler | Iterator | type | Enum | BaseException):
        return False
    if comes_from(kind, OUTSIDE):
        return False
    try:
        make_bare(kind)
    except TypeError:
        return False
    return kind.__module__ != "builtins"


def comes_from(kind: type, modules: Collection[str]) -> bool:
    """Return whether a class, or one of its bases, is defined in one of some top-level modules."""
    return any(base.__module__.partition(".")[0] in modules for base in kind.__mro__)


def make_bare(kind: type) -> Any:
    """Return an instance of a plain class without attributes; no method of the class runs.

    Raises:
        TypeError: if a base class in C has memory of its own, as those of arrays and dicts have.
    """
    base = SimpleNamespace if issubclass(kind, SimpleNamespace) else object
    return base.__new__(kind)


@cache
def _slots_of(kind: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    return tuple(
        (name, guard)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, guard in vars(base).items()
        if isinstance(guard, MemberDescriptorType)
    )


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the members that a class and its bases declare in ``__slots__``."""
    return dict(reversed(_slots_of(cast("Hashable", kind))))


def table_of(part: Any) -> dict[str, Any]:
    """Return the dict of an object's attributes, or an empty one; no method of its class runs."""
    try:
        table = object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}
    return table if type(table) is dict else {}


def cells_of(part: Any) -> dict[str, CellType]:
    """Return the variables that a function shares with the one around it, by attribute."""
    if type(part) is not FunctionType or part.__closure__ is None:
        return {}
    names = (f"closure.{name}" for name in part.__code__.co_freevars)
    return dict(zip(names, part.__closure__, strict=True))


_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__")


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of an object by name: also slots, closures and default arguments."""
    found = dict(table_of(part))
    if type(part) is FunctionType:
        found |= {name: held for name in _OF_FUNCTIONS if (held := getattr(part, name))}
    for name, cell in cells_of(part).items():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable without a value
            continue
    for name, guard in slots_of(type(part)).items():
        try:
            found[name] = guard.__get__(part)
        except AttributeError:
            continue
    return dict(sorted(found.items()))


def elements_of(value: Any) -> Iterable[Any]:
    """Return what a container holds, without running a method of a user's class."""
    base = _base_of(value)
    if base in (dict, OrderedDict):
        return (*dict.keys(value), *dict.values(value))
    if base is not None:
        return () if base is bytearray else content_of(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value.flat)
    return ()


def children_of(value: Any) -> list[Any]:
    """Return what a value refers to: members, attributes, and what a partial or a method calls."""
    if type(value) in WITHOUT_ATTRIBUTES:
        return [*elements_of(value)]
    if isinstance(value, ModuleType):
        return []
    parts = [*elements_of(value), *attributes_of(value).values()]
    if isinstance(value, partial):
        parts += (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        parts.append(value.__self__)
    elif isinstance(value, torch.Tensor):
        parts += (value.grad,) if value.is_leaf else ()
    elif isinstance(value, torch.nn.Module):
        # A scripted module holds them outside its attributes.
        parts += (*value.parameters(recurse=False), *value.buffers(recurse=False))
    return parts


def each_in(root: Any, follow: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield a value and all that it leads to, each object once.

    Args:
        root: the value.
        follow: returns what a value leads to.
    """
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            # Kept alive while its id is remembered: another object could get the same one.
            seen[id(value)] = value
            yield value
            waiting += follow(value)


def is_mutable(value: Any) -> bool:
    """Return whether a value is a container that :func:`refill` can give other content."""
    return _base_of(value) in _MUTABLE


def content_of(part: Any) -> Collection[Any]:
    """Return the members of a container in order; of a dict, its keys with their values."""
    base = _base_of(part)
    if base is bytearray:
        return bytes(part)
    return list(base.items(part) if issubclass(base, dict) else base.__iter__(part))


def _base_of(value: Any) -> Any:
    return _find_base(cast("Hashable", type(value)))


@cache
def _find_base(kind: type) -> Any:
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def refill(part: Any, content: Collection[Any]) -> None:
    """Give a container its members in place, without running a method of a user's class.

    Args:
        part: a list, dict, set, deque or byte array.
        content: as :func:`content_of` returns it.
    """
    base = _base_of(part)
    if base in (list, bytearray):
        base.__setitem__(part, slice(None), base(content))
        return
    base.clear(part)
    if base in (dict, OrderedDict):
        for key, member in content:
            base.__setitem__(part, key, member)
    else:
        (set.update if base is set else deque.extend)(part, content)


def set_attribute(part: Any, name: str, value: Any) -> None:
    """Set an attribute of a plain object without running a method of its class."""
    guard, cell = slots_of(type(part)).get(name), cells_of(part).get(name)
    if guard is not None:
        guard.__set__(part, value)
    elif cell is not None:
        cell.cell_contents = value
    elif type(part) is FunctionType and name in _OF_FUNCTIONS:
        setattr(part, name, value)
    else:
        table_of(part)[name] = value


def delete_attribute(part: Any, name: str) -> None:
    """Delete an attribute of a plain object, if it is there."""
    guard, cell = slots_of(type(part)).get(name), cells_of(part).get(name)
    if guard is not None and name in attributes_of(part):
        guard.__delete__(part)
    elif cell is not None:
        del cell.cell_contents
    else:
        table_of(part).pop(name, None)


@final
class Identities:
    """Numbers for objects that are compared by identity. No number is given twice.

    An address alone is not enough: a new object may have the address of a deleted one.

    Attributes:
        num_given: how many were given.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self.num_given = 0  # Not an itertools.count, which Python 3.14 can neither copy nor pickle.

    def number(self, value: object) -> int:
        """Return the number of an object, which is new if the object is.

        An iterator gets a new one in each call, because its position is unknown.
        """
        if isinstance(value, Iterator) and not isinstance(value, (io.IOBase, *weakref.ProxyTypes)):
            return self._give()
        if not self.knows(value):
            self._numbers[id(value)] = (refer_to(value), self._give())
        return self._numbers[id(value)][1]

    def knows(self, value: object) -> bool:
        """Return whether an object has a number."""
        entry = self._numbers.get(id(value))
        return entry is not None and entry[0]() is value

    def _give(self) -> int:
        self.num_given += 1
        return self.num_given


def refer_to(value: object) -> Callable[[], Any]:
    """Return a weak reference; what takes none is kept, so that its address stays its own."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value

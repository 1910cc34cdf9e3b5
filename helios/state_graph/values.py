"""Defines which values a checkpoint can hold, and what they consist of."""

from __future__ import annotations

import datetime
import io
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from enum import Flag
from fractions import Fraction
from functools import partial, reduce
from operator import or_
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import (
    MethodType,
    ModuleType,
)
from typing import Any, final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

from helios.storage.plain_objects import OUTSIDE as OUTSIDE
from helios.storage.plain_objects import RESOURCES as RESOURCES
from helios.storage.plain_objects import attributes_of as attributes_of
from helios.storage.plain_objects import comes_from as comes_from
from helios.storage.plain_objects import content_of as content_of
from helios.storage.plain_objects import delete_attribute as delete_attribute
from helios.storage.plain_objects import find_base as find_base
from helios.storage.plain_objects import is_mutable as is_mutable
from helios.storage.plain_objects import is_plain_object as is_plain_object
from helios.storage.plain_objects import make_bare as make_bare
from helios.storage.plain_objects import refill as refill
from helios.storage.plain_objects import set_attribute as set_attribute
from helios.storage.plain_objects import slots_of as slots_of
from helios.storage.plain_objects import table_of as table_of

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


def elements_of(value: Any) -> Iterable[Any]:
    """Return what a container holds, without running a method of a user's class."""
    base = find_base(value)
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

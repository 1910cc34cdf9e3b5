"""Reads and writes the content of objects and containers without running a method of a user."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import cache
from types import CellType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, Sampler

RESOURCES = frozenset(
    (
        *("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
        *("_asyncio", "socket", "_socket", "subprocess", "io", "_io", "sqlite3", "_sqlite3"),
    )
)
"""Modules whose objects use resources outside the process's memory, or belong to other threads."""

OUTSIDE = RESOURCES | {
    *("logging", "weakref", "_weakref", "ctypes", "_ctypes", "importlib", "inspect")
}
"""Modules whose objects are no values."""

_MUTABLE = (OrderedDict, dict, list, bytearray, set, deque)
_CONTAINERS = (*_MUTABLE, tuple, frozenset)


_T = TypeVar("_T")


def by_class(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Compute what is asked of a class once."""
    return cache(function)


@by_class
def is_plain_object(kind: type) -> bool:
    """Return whether instances of a class consist of attributes alone.

    These can be read and set without running a method of the class. Samplers, data sets and
    iterators are not among them: what they hold may have been read ahead.
    """
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


@by_class
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the members that a class and its bases declare in ``__slots__``."""
    return {
        name: guard
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, guard in vars(base).items()
        if isinstance(guard, MemberDescriptorType)
    }


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


def is_mutable(value: Any) -> bool:
    """Return whether a value is a container that :func:`refill` can give other content."""
    return find_base(value) in _MUTABLE


def content_of(part: Any) -> Collection[Any]:
    """Return the members of a container in order; of a dict, its keys with their values."""
    base = find_base(part)
    if base is bytearray:
        return bytes(part)
    return list(base.items(part) if issubclass(base, dict) else base.__iter__(part))


def find_base(value: Any) -> Any:
    """Return the built-in type of a container or of an instance of its subclass, or ``None``."""
    return _base_of(type(value))


@by_class
def _base_of(kind: type) -> Any:
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def refill(part: Any, content: Collection[Any]) -> None:
    """Give a container its members in place, without running a method of a user's class.

    Args:
        part: a list, dict, set, deque or byte array.
        content: as :func:`content_of` returns it.
    """
    base = find_base(part)
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

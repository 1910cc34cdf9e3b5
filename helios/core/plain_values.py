"""Values that users declare, or that attributes hold, as plain data that is stored and compared.

A table of them is flat: names with dots lead to numbers, strings, bools, ``None`` and lists of
these. Anything longer than a line, and a nested table of many entries, is stored as its length and
a hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import numbers
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from helios.errors import ArgumentError

_MAX_DEPTH = 20
_MAX_NESTED = 5
_MAX_LENGTH = 500
_MAX_MEMBERS = 100_000
_MAX_ENTRIES = 200
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_AS_TEXT = (PurePath, torch.dtype, torch.device, range)


def flatten_params(given: Any) -> dict[str, Any]:
    """Return ``Trainer(params=...)`` as a flat table.

    Args:
        given: a mapping, a dataclass or a namespace; ``None`` for nothing.

    Raises:
        ArgumentError: for something else, or for a value that is not plain.
    """
    if given is None:
        return {}
    table = _as_table(given)
    if table is None:
        raise ArgumentError(
            "Trainer(params=...) must be a mapping, a dataclass or a namespace, got "
            f"{type(given).__name__}. Pass e.g. {{'lr': 0.1}} or vars(config)."
        )
    try:
        return _flatten_once(_Describing(_convert_declared).describe(table))
    except _UnsuitableError as error:
        where = ".".join(error.path)
        raise ArgumentError(
            f"Trainer(params=...) must hold numbers, strings, bools, None, enums, paths, and "
            f"containers of these, got a {type(error.value).__name__} as params.{where}. Leave it "
            "out, or pass what defines it."
        ) from None


def plain_values(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the plain values that an attribute holds, by name; nothing for anything else.

    Tables, such as a dataclass with a configuration, are searched. No object of a user makes this
    fail, and none is read that may load its items only then.

    Args:
        name: that of the attribute.
        value: its value.
        depth: how many tables it is in.
    """
    table: dict[str, Any] = {}
    try:
        if isinstance(value, dict) and len(value) <= _MAX_ENTRIES:
            # The text of other keys may be another one in each process.
            table = {str(key): each for key, each in value.items() if isinstance(key, str | int)}
        elif isinstance(value, Namespace | types.SimpleNamespace) or _is_record(value):
            table = _as_table(value) or {}
        else:
            yield from _shortened({name: _Describing(_refuse).describe(value)})
    except Exception:
        # Not plain, or such as a number that has too many digits for a text.
        return
    for key, each in table.items() if depth < _MAX_NESTED else ():
        yield from plain_values(f"{name}.{key}", each, depth + 1)


def _refuse(value: Any) -> Any:
    raise _UnsuitableError(value)


class _UnsuitableError(Exception):
    """A value that is not plain, and where it is."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.path: tuple[str, ...] = ()


class _Describing:
    """Turns one value into plain data.

    Args:
        convert: returns what stands for a value that is not plain.
    """

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert
        self._left = _MAX_MEMBERS

    def describe(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if value is None or isinstance(value, bool | int | float | str):
            return _as_builtin(value)
        if isinstance(value, numbers.Number | np.generic):
            return str(value) if isinstance(value, complex) else _as_builtin(_item(value))
        if isinstance(value, _NAMED):
            return _qualified_name(value)
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, functools.partial):
            given = {str(number): each for number, each in enumerate(value.args)}
            value = {"function": value.func, **given, **value.keywords}
        if not isinstance(value, dict | list | tuple | set | frozenset):
            found = self._convert(value)
            return self.describe(found, depth + 1) if isinstance(found, dict | list) else found
        self._left -= len(value)
        if depth > _MAX_DEPTH or self._left < 0:
            return f"{type(value).__name__} of {len(value)}"
        if isinstance(value, dict):
            table = {self._name(key): each for key, each in value.items()}
            return {name: self._member(name, each, depth) for name, each in table.items()}
        members = [self._member(str(index), each, depth) for index, each in enumerate(value)]
        return sorted(members, key=repr) if isinstance(value, set | frozenset) else members

    def _name(self, key: Any) -> str:
        # The text of a function or an object is another one in each process.
        return key if isinstance(key, str) else str(self.describe(key))

    def _member(self, key: str, value: Any, depth: int) -> Any:
        try:
            return self.describe(value, depth + 1)
        except _UnsuitableError as error:
            error.path = (key, *error.path)
            raise


def _convert_declared(value: Any) -> Any:
    """Return what stands for a value of ``params``.

    Raises:
        _UnsuitableError: if nothing does.
    """
    table = _as_table(value)
    if table is not None:
        return table
    # Such as the lists of OmegaConf.
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [*value]
    raise _UnsuitableError(value)


def _as_table(value: Any) -> dict[str, Any] | None:
    """Return the entries of what has names; ``None`` for anything else."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if _is_record(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Namespace | types.SimpleNamespace):
        return dict(vars(value))
    return None


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _as_builtin(value: Any) -> Any:
    """Return a number or string of a subclass as what it is: files hold no others."""
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if kind is None or type(value) is kind else kind(value)


def _item(value: Any) -> Any:
    found = value.item() if isinstance(value, np.generic) else value
    return found if isinstance(found, bool | int | float | str) else str(found)


def _qualified_name(value: Any) -> str:
    # Python imports the script again in a rank that it starts, as a module of another name.
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
    return f"{module}.{value.__qualname__}"


def _flatten_once(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _shortened(table):
        if name in found:
            raise ArgumentError(
                f"Trainer(params=...) must have each name once, got {name!r} both as a key with a "
                "dot and as a nested one. Rename one of them."
            )
        found[name] = value
    return found


def _shortened(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, _shorten(value)) for name, value in _entries("", table))


def _entries(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    is_short = not isinstance(value, dict | list) or len(value) <= _MAX_ENTRIES
    if isinstance(value, list) and is_short and any(_contains_table(each) for each in value):
        value = {str(index): each for index, each in enumerate(value)}
    if not isinstance(value, dict) or (prefix and not is_short):
        yield prefix, value
        return
    for name, each in value.items():
        yield from _entries(f"{prefix}.{name}" if prefix else name, each)


def _contains_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_contains_table, value)))


def _shorten(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _MAX_LENGTH and not isinstance(value, dict):
        return value
    mark = hashlib.sha256(text.encode()).hexdigest()[:12]
    is_text = isinstance(value, str)
    what = f"{len(text)} characters" if is_text else f"{type(value).__name__} of {len(value)}"
    return f"{what} ({mark})"

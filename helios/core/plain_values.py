"""Values that users declare, or that attributes hold, as plain data to store and compare.

A table of them is flat: names with dots map to JSON values. A long value is stored as its length
and a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from helios.errors import ArgumentError

_MAX_LENGTH = 500
_MAX_ENTRIES = 200
# Longer ones are compared by their length: a start reads all of them.
_MAX_MEMBERS = 100_000


def flatten_params(given: Any) -> dict[str, Any]:
    """Return ``Trainer(params=...)`` as a flat table.

    Args:
        given: a mapping, a dataclass or a namespace; ``None`` for nothing.

    Raises:
        ArgumentError: for something else, or for a value that is not plain.
    """
    table = {} if given is None else _as_table(given, True)
    if table is None:
        raise ArgumentError(
            "Trainer(params=...) must be a mapping, a dataclass or a namespace, got "
            f"{type(given).__name__}. Pass e.g. {{'lr': 0.1}} or vars(config)."
        )
    entries = [each for name in table for each in _flatten(name, table[name], True)]
    found = {}
    for name, value in entries:
        try:
            found[name] = _shorten(value, True)
        except (TypeError, ValueError):
            raise ArgumentError(
                "Trainer(params=...) must hold numbers, strings, bools, None, enums, paths, and "
                f"containers of these, got a {type(value).__name__} in params.{name}. Leave it "
                "out, or pass what defines it."
            ) from None
    return found


def plain_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values that an attribute holds, by name; nothing for anything else.

    Tables, such as a dataclass with a configuration, are searched. Objects of users cannot make
    this fail, and objects that may load their items lazily are not read.

    Args:
        name: that of the attribute.
        value: its value.
    """
    try:
        entries = [*_flatten(name, value, False)]
    except Exception:  # such as a table that contains itself
        return
    for path, each in entries:
        try:
            yield path, _shorten(each, False)
        except Exception:  # not plain
            continue


def qualified_name(value: Any) -> str:
    """Return the module and the name of a class or function, the same in every process of a run."""
    # Python imports the script again in a rank that it starts, as a module of another name.
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
    return f"{module}.{value.__qualname__}"


def _flatten(name: str, value: Any, is_declared: bool) -> Iterator[tuple[str, Any]]:
    table = _as_table(value, is_declared)
    if not table or len(table) > _MAX_ENTRIES:
        yield name, value
        return
    for key, each in table.items():
        yield from _flatten(f"{name}.{key}", each, is_declared)


def _as_table(value: Any, is_declared: bool) -> dict[Any, Any] | None:
    """Return the entries of what has names; ``None`` for anything else.

    Args:
        value: anything.
        is_declared: whether a user has passed it as ``params``, so that any mapping may be read.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, partial):
        return {"function": value.func, "args": value.args, **value.keywords}
    # The text of other keys may differ in each process.
    is_named = isinstance(value, Mapping if is_declared else dict) and all(
        isinstance(key, str | int) for key in value
    )
    return dict(value) if is_named and not isinstance(value, Counter) else None


def _shorten(value: Any, is_declared: bool) -> Any:
    if isinstance(value, Sized) and len(value) > _MAX_MEMBERS:
        return f"{type(value).__name__} of {len(value)} members"
    text = json.dumps(value, default=partial(_simplify, is_declared=is_declared), sort_keys=True)
    if len(text) <= _MAX_LENGTH:
        return json.loads(text)
    mark = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{type(value).__name__} of {len(text)} characters ({mark})"


def _simplify(value: Any, is_declared: bool) -> Any:
    """Return what stands for a value that JSON does not know."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return qualified_name(value)
    if isinstance(value, PurePath | torch.dtype | torch.device | range):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    table = _as_table(value, is_declared)
    if table is None and is_declared and isinstance(value, Sequence):
        return [*value]  # such as a list of OmegaConf
    if table is None:
        raise TypeError(type(value))
    return table


class Absent(Enum):
    """The value of a name that only the other side has."""

    ABSENT = "not set"

    def __repr__(self) -> str:
        return str(self.value)


class ValueChange(NamedTuple):
    """A name whose value differs; on the side that lacks it, it is :class:`Absent`."""

    name: str
    before: Any
    after: Any

    @property
    def is_contradiction(self) -> bool:
        """Whether both sides have the name."""
        return Absent.ABSENT not in (self.before, self.after)


def stored_params(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a run has declared; empty if it has declared none.

    Args:
        table: the options of a checkpoint or of its sidecar.
    """
    return dict(table.get("params", {}))


def compare_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ValueChange]:
    """Return the names whose values differ in two flat tables."""
    names = dict.fromkeys([*before, *after])
    absent = Absent.ABSENT
    pairs = [ValueChange(name, before.get(name, absent), after.get(name, absent)) for name in names]
    # NaN differs from itself, but not its text.
    return [x for x in pairs if x.before != x.after and repr(x.before) != repr(x.after)]

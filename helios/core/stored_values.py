"""Flat tables of plain values, as files hold them: read, compared and shown.

Nothing of PyTorch is needed for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


class Absent(Enum):
    """The value of a name that only the other side has."""

    ABSENT = "not set"


ABSENT = Absent.ABSENT


class ValueChange(NamedTuple):
    """A name whose value differs; on the side that lacks it, it is :data:`ABSENT`."""

    name: str
    before: Any
    after: Any

    @property
    def is_contradiction(self) -> bool:
        """Whether both sides have the name."""
        return ABSENT not in (self.before, self.after)

    @property
    def values(self) -> str:
        """Both values, as ``old -> new``."""
        before, after = show_value(self.before), show_value(self.after)
        if before == after:
            before, after = repr(self.before), repr(self.after)
        return f"{before} -> {after}"


def show_value(value: Any) -> str:
    """Return a value as text for messages and tables."""
    if value is ABSENT:
        return str(ABSENT.value)
    is_clear = not isinstance(value, str) or (value != "" and value.isprintable())
    return str(value) if is_clear else repr(value)


def stored_params(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a run has declared; empty if it has declared none.

    Args:
        table: the options of a checkpoint or of its sidecar.
    """
    return dict(table.get("params", {}))


def list_values(values: Mapping[str, Any]) -> str:
    """Return a flat table as one line of text."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in values.items())


def compare_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ValueChange]:
    """Return the names whose values differ in two flat tables."""
    names = dict.fromkeys([*before, *after])
    pairs = [ValueChange(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    return [each for each in pairs if not _is_same(each.before, each.after)]


def _is_same(one: Any, other: Any) -> bool:
    # NaN is equal to itself here.
    if ABSENT in (one, other):
        return one is other
    return bool(one == other) or json.dumps(one) == json.dumps(other)

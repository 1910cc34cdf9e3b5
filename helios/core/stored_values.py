"""Flat tables of plain values, as files hold them: read, compared and shown.

Nothing of PyTorch is needed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


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


def list_values(values: Mapping[str, Any]) -> str:
    """Return a flat table as one line of text."""
    return ", ".join(f"{name} {value!r}" for name, value in values.items())


def compare_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ValueChange]:
    """Return the names whose values differ in two flat tables."""
    names = dict.fromkeys([*before, *after])
    absent = Absent.ABSENT
    pairs = [ValueChange(name, before.get(name, absent), after.get(name, absent)) for name in names]
    # NaN differs from itself, but not its text.
    return [x for x in pairs if x.before != x.after and repr(x.before) != repr(x.after)]

"""Handles what modules return from ``get_extra_state``: neither saved twice nor missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from helios.run_state.changes import Changes
from helios.run_state.plain_values import Identities
from helios.run_state.value_scan import mark_of_state
from helios.run_state.walk_result import WalkResult


def extra_marks(found: WalkResult, identities: Identities) -> dict[str, bytes]:
    """Return marks of the current extra states of modules, by the path of their attributes."""
    marks: dict[str, bytes] = {}
    for parent, module in _modules_with_extra_state(found):
        try:
            marks[parent] = mark_of_state(module.get_extra_state(), identities)
        except Exception:  # user code, which may need a first step
            marks[parent] = b""
    return marks


def leave_to_extra_states(
    changes: Changes, found: WalkResult, before: Mapping[str, bytes], identities: Identities
) -> None:
    """Leave values that no checkpoint can hold to a module whose extra state changed with them.

    The form in which the extra state contains them is unknown. If it did not change, it does not
    contain them.

    Args:
        changes: of plain values; those that are left to a module are removed.
        found: what the owner holds now.
        before: marks of extra states after setup.
        identities: numbers for values that cannot be pickled.
    """
    lacking = {slot.parent for slot in (*changes.others, *changes.large)}
    if lacking.isdisjoint(before):
        return
    now = extra_marks(found, identities)
    telling = {path for path in lacking & now.keys() if now[path] != before.get(path)}
    for slots in (changes.others, changes.large):
        for slot in [slot for slot in slots if slot.parent in telling]:
            slots.remove(slot)
            del changes.missing[slot.path]


def _modules_with_extra_state(found: WalkResult) -> Iterator[tuple[str, nn.Module]]:
    for parent, part in found.containers.items():
        if isinstance(part, nn.Module) and has_extra_state(part):
            yield parent, part


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has an extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state

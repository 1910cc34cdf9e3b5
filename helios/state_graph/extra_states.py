"""Handles what modules return from ``get_extra_state``: neither saved twice nor missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from helios.state_graph.changes import Changes
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.scanning import mark_of_state
from helios.state_graph.values import Identities


def extra_marks(found: ObjectNames, identities: Identities) -> dict[str, bytes]:
    """Return marks of the current extra states of modules, by the path of their attributes."""
    marks: dict[str, bytes] = {}
    for parent, module in _modules_with_extra_state(found):
        try:
            marks[parent] = mark_of_state(module.get_extra_state(), identities)
        except Exception:  # user code, which may need a first step
            marks[parent] = b""
    return marks


def leave_to_extra_states(
    changes: Changes, found: ObjectNames, before: Mapping[str, bytes], identities: Identities
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
    lacking = {path.rpartition(".")[0] for path in (*changes.others, *changes.large)}
    if lacking.isdisjoint(before):
        return
    now = extra_marks(found, identities)
    telling = {path for path in lacking & now.keys() if now[path] != before.get(path)}
    for table in (changes.others, changes.large):
        for path in [path for path in table if path.rpartition(".")[0] in telling]:
            del table[path], changes.missing[path]


def _modules_with_extra_state(found: ObjectNames) -> Iterator[tuple[str, nn.Module]]:
    for network in found.all_modules().values():
        for _, part in found.networks.of(network).modules:
            if has_extra_state(part):
                yield found.names[id(part)], part


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has an extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state

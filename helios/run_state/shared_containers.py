"""Finds plain values that share lists, dicts or memory, which must be saved together."""

from __future__ import annotations

from helios.core.memory import extent_of, overlapping
from helios.run_state.value_hash import Look
from helios.run_state.walk_result import SlotKey


def links_of(looks: dict[SlotKey, Look]) -> dict[SlotKey, frozenset[SlotKey]]:
    """Return, for each plain value, the others that share mutable parts with it."""
    _join_memory(looks)
    first: dict[int, SlotKey] = {}
    links: dict[SlotKey, set[SlotKey]] = {}
    for where, look in looks.items():
        for part in look.parts if look.is_plain else ():
            other = first.setdefault(part, where)
            if other is not where:
                links.setdefault(where, set()).add(other)
                links.setdefault(other, set()).add(where)
    return {where: frozenset(others) for where, others in links.items()}


def _join_memory(looks: dict[SlotKey, Look]) -> None:
    """Treat arrays and tensors in the same memory as one part."""
    if not any(look.lends for look in looks.values()):
        return
    holders: list[Look] = []
    extents = []
    for look in looks.values():
        for part in look.memory:
            holders.append(look)
            extents.append(extent_of(part))
    for number, group in enumerate(overlapping(extents)):
        for member in group if len(group) > 1 else ():
            holders[member].parts.add(-1 - number)

"""Finds plain values that training has changed since setup, and restores them.

All saved values are in one payload, so that two attributes that refer to one list still do after a
resume. Aliases of a saved value are therefore saved too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from helios.core.text import size_text
from helios.protocols import Clock
from helios.run_state import unsupported_values
from helios.run_state.aliases import holds, put, remove
from helios.run_state.plain_values import (
    LIMIT,
    MEMBERS_OF,
    Identities,
    Surroundings,
    tensors_in,
)
from helios.run_state.rebuild import Resolver, Values, rebuild, substitute
from helios.run_state.save_times import SaveTimes
from helios.run_state.shared_containers import links_of
from helios.run_state.value_hash import Digest, Look
from helios.run_state.value_scan import look_at
from helios.run_state.walk_result import Slot, SlotKey, WalkResult
from helios.storage.user_types import type_name

_UNLIKE_ANY = Digest(is_plain=False, mark=b"", size=0)


class _Value(NamedTuple):
    """A plain value and its scan."""

    slot: Slot
    look: Look


@dataclass(frozen=True)
class Changes:
    """What training has changed.

    Attributes:
        values: what is saved: ``changed`` values by the path of their container and by key,
            ``deleted`` keys by that path, and ``devices``, the device types of the tensors among
            them unless all are on the CPU.
        missing: the reason why anything else that training has changed is not saved, by path.
        large: plain values beyond the limit.
        others: what no checkpoint can hold.
        reached: storages of which plain values see more than what is saved with a tensor, and
            the paths of these values.
        room: bytes left for further plain values.
    """

    values: dict[str, Any]
    missing: dict[str, str] = field(default_factory=dict)
    large: list[Slot] = field(default_factory=list)
    others: list[Slot] = field(default_factory=list)
    reached: dict[int, list[Slot]] = field(default_factory=dict)
    room: int = 0

    def refuse(self, slots: Iterable[Slot], limit: int) -> None:
        """Report values that are too large, and leave them out."""
        for slot in slots:
            self.drop([(slot.parent, slot.key)])
            if slot.path not in self.missing:
                self.large.append(slot)
                self.missing[slot.path] = unsupported_values.TOO_LARGE.format(size_text(limit))

    def drop(self, wheres: Iterable[SlotKey]) -> None:
        """Leave out slots."""
        changed = self.values["changed"]
        for parent, key in wheres:
            changed.get(parent, {}).pop(key, None)
            if not changed.get(parent, True):
                del changed[parent]

    def leave_out(self, new: Collection[str]) -> list[SlotKey]:
        """Leave out slots of containers that setup does not create, and return these slots."""
        changed = self.values["changed"]
        return [(parent, key) for parent in changed.keys() & new for key in changed.pop(parent)]


@dataclass
class _Made:
    """What setup made: digests, which slots share mutable parts, enums and dataclasses."""

    digests: dict[SlotKey, Digest]
    links: dict[SlotKey, frozenset[SlotKey]]
    types: set[type]


@final
class PlainValues:
    """Records what setup made of an owner's values, and finds what training has changed.

    Args:
        identities: numbers for values that cannot be pickled.
        clock: returns the time in seconds, to find what makes saves slow.

    Attributes:
        times: how long saves inspect each attribute.
        limit: maximum bytes of plain values in a state.
        safe_types: types that loading may build besides those of the values that setup made.
    """

    def __init__(self, identities: Identities, *, clock: Clock = time.monotonic) -> None:
        self._identities = identities
        self._clock = clock
        self.times = SaveTimes(clock)
        self._made = _Made({}, {}, set())
        self._lost: dict[SlotKey, tuple[type, str]] = {}
        self.limit = LIMIT
        self.safe_types: tuple[Any, ...] = ()

    def remember(self, found: WalkResult, surroundings: Surroundings) -> set[int]:
        """Record the current values as made by setup; return the storages that values reach."""
        self._lost = {}
        digests: dict[SlotKey, Digest] = {}
        shared: dict[SlotKey, Look] = {}
        types: set[type] = set()
        reached: set[int] = set()
        for where, look in self._look(found.slots, surroundings):
            digests[where] = look.digest
            types |= look.types
            reached |= look.reached
            if look.parts:
                # Networks have thousands of numbers, of which nothing else is needed.
                shared[where] = look
        self._made = _Made(digests, links_of(shared), types)
        self.times = SaveTimes(self._clock)
        return reached

    def renew_unsaved(
        self, found: WalkResult, surroundings: Surroundings, new: Collection[str] = ()
    ) -> None:
        """Treat values that cannot be saved as unchanged: each start of a run creates them again.

        Args:
            found: what the owner holds now.
            surroundings: what is saved elsewhere.
            new: the paths of containers that setup does not create.
        """
        for where, look in self._look(found.slots, surroundings):
            if look.obstacle or where[0] in new:
                self._made.digests[where] = look.digest
            self._made.types |= look.types

    @property
    def num_bytes(self) -> int:
        """Bytes that a state will have if training changes everything that setup made."""
        sizes = (digest.size for digest in self._made.digests.values() if digest.is_plain)
        return min(sum(sizes), self.limit)

    def distrust(self, places: Iterable[SlotKey]) -> None:
        """Treat slots as changed, whatever they hold, or as deleted if they no longer exist."""
        self._made.digests.update(dict.fromkeys(places, _UNLIKE_ANY))

    def changes(self, found: WalkResult, surroundings: Surroundings) -> Changes:
        """Compare with what setup made.

        Args:
            found: what the owner holds now.
            surroundings: what is saved elsewhere.
        """
        # A value that is known to be lost need not be read again.
        others = {where: slot for where, slot in found.slots.items() if self._is_lost(where, slot)}
        slots = {where: slot for where, slot in found.slots.items() if where not in others}
        looks = dict(self._look(slots, surroundings))
        return self._compare(found, looks, others)

    def restore(
        self,
        values: dict[str, Any],
        found: WalkResult,
        surroundings: Surroundings,
        may_set: Callable[[str, Any], bool],
    ) -> None:
        """Restore copies of saved values, and remove what training had removed.

        Args:
            values: :attr:`Changes.values`.
            found: what the owner holds now.
            surroundings: what is saved elsewhere.
            may_set: whether a key of the container at a path may be set.

        Raises:
            StateError: for an unknown type or tensor; then nothing is changed.
        """
        present = {where: slot.value for where, slot in found.slots.items()}
        resolver = Resolver(present, surroundings, self.safe_types)
        changed = rebuild(values["changed"], values["devices"], resolver)
        for parent, members in changed.items():
            for key, value in members.items():
                if may_set(parent, key):
                    put(found.containers[parent], key, value)
        for parent, keys in values["deleted"].items():
            for key in reversed(keys):
                if (parent, key) in found.slots:
                    remove(found.containers[parent], key)

    def _is_lost(self, where: SlotKey, slot: Slot) -> bool:
        kind, _ = self._lost.get(where, (None, ""))
        return kind is type(slot.value)

    def _look(
        self, slots: dict[SlotKey, Slot], surroundings: Surroundings
    ) -> Iterator[tuple[SlotKey, Look]]:
        for where, slot in slots.items():
            begin = self.times.clock()
            look = look_at(slot.value, surroundings, self._identities)
            self.times.add(place_of(slot), self.times.clock() - begin)
            if not slot.is_settable:
                look.obstacle = look.obstacle or unsupported_values.IN_TUPLE
            yield where, look

    def _compare(
        self, found: WalkResult, looks: dict[SlotKey, Look], lost: dict[SlotKey, Slot]
    ) -> Changes:
        before, links = self._made, links_of(looks)
        known = before.types | {kind for kind in self.safe_types if isinstance(kind, type)}
        changed: list[_Value] = []
        unchanged: list[_Value] = []
        missing = {slot.path: self._lost[where][1] for where, slot in lost.items()}
        others = list(lost.values())
        for where, look in looks.items():
            slot = found.slots[where]
            digest = before.digests.get(where)
            has_changed = digest is None or digest[:2] != look.digest[:2]
            has_changed |= links.get(where) != before.links.get(where)
            obstacle = look.obstacle or _unknown(look.types - known)
            if not obstacle:
                (changed if has_changed else unchanged).append(_Value(slot, look))
            elif has_changed:
                others.append(slot)
                missing[slot.path] = (
                    f"{slot.path}{look.fault}: {obstacle}" if look.fault else obstacle
                )
                if look.obstacle and type(slot.value) not in MEMBERS_OF:
                    self._lost[where] = type(slot.value), missing[slot.path]
        kept, large, room = _within_limit(_with_aliases(changed, unchanged), self.limit)
        values = _payload(kept, _deleted(found, before.digests))
        reached: dict[int, list[Slot]] = {}
        for where, look in looks.items():
            for storage in look.reached:
                reached.setdefault(storage, []).append(found.slots[where])
        changes = Changes(values, missing, [], others, reached, room)
        changes.refuse(large, self.limit)
        return changes


def place_of(slot: Slot) -> str:
    """Return the attribute or module of a slot, which is measured as a whole."""
    if slot.parent.endswith("/"):
        return slot.parent.rstrip("/")
    return (slot.parent or str(slot.key)).partition(".")[0]


def _unknown(kinds: set[type]) -> str:
    if not kinds:
        return ""
    names = ", ".join(sorted(map(type_name, kinds)))
    return unsupported_values.UNKNOWN.format(names)


def _with_aliases(changed: list[_Value], unchanged: list[_Value]) -> list[_Value]:
    """Add the values that share a list, dict, array or tensor with one that is saved."""
    group = list(changed)
    waiting = [value for value in unchanged if value.look.parts]
    shared: set[int] = set().union(*(value.look.parts for value in group))
    while joining := [value for value in waiting if not shared.isdisjoint(value.look.parts)]:
        group += joining
        waiting = [value for value in waiting if shared.isdisjoint(value.look.parts)]
        shared.update(*(value.look.parts for value in joining))
    return group


def _within_limit(values: list[_Value], limit: int) -> tuple[list[_Value], list[Slot], int]:
    """Return what is saved, what is too large, and the remaining room; the smallest come first."""
    kept: list[_Value] = []
    large: list[Slot] = []
    counted: set[int] = set()
    total = 0
    for value in sorted(values, key=lambda value: (value.look.size, value.slot.path)):
        parts = value.look.parts
        size = 0 if parts and parts <= counted else value.look.size
        if total + size > limit:
            large.append(value.slot)
            continue
        total += size
        counted |= parts
        kept.append(value)
    kept.sort(key=lambda value: _order(value.slot))
    return kept, sorted(large, key=_order), limit - total


def _order(slot: Slot) -> tuple[str, int, str]:
    """Return a key to sort slots by path, those of a list by index, in which they are restored."""
    return slot.parent, slot.key if isinstance(slot.key, int) else 0, slot.path


def _payload(kept: list[_Value], deleted: dict[str, list[Any]]) -> dict[str, Any]:
    values: Values = {}
    for slot, _ in kept:
        values.setdefault(slot.parent, {})[slot.key] = slot.value
    named = [value for value in kept if value.look.records or value.look.aliases]
    if named:
        # Together with values that share parts with them, so that they still do.
        known = set(map(id, named))
        group = _with_aliases(named, [value for value in kept if id(value) not in known])
        table: Values = {}
        for slot, _ in group:
            table.setdefault(slot.parent, {})[slot.key] = slot.value
        for parent, members in substitute(table, [value.look for value in group]).items():
            values[parent] |= members
    devices = [tensor.device.type for tensor in tensors_in(values)]
    has_moved = bool(set(devices) - {"cpu"})
    return {"changed": values, "deleted": deleted, "devices": devices if has_moved else []}


def _deleted(found: WalkResult, made: dict[SlotKey, Digest]) -> dict[str, list[Any]]:
    """Return the keys that were removed from containers, in the order in which setup made them."""
    deleted: dict[str, list[Any]] = {}
    for parent, key in made:
        container = found.containers.get(parent)
        if container is None or (parent, key) in found.slots:
            continue
        if not holds(container, key):
            deleted.setdefault(parent, []).append(key)
    return deleted


def places_in(values: dict[str, Any]) -> list[SlotKey]:
    """Return the slots of saved values, including deleted ones."""
    return [
        (parent, key)
        for kind in ("changed", "deleted")
        for parent, keys in values[kind].items()
        for key in keys
    ]

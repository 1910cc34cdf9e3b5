"""Compares a graph with the one after setup, and encodes what training has changed.

A changed container is saved as a whole, of attributes those that changed. Other nodes stand in a
value by name, so that each is saved once. What a checkpoint cannot hold is known in one place.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag
from functools import cached_property
from operator import is_
from typing import Any, final

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from helios.core.generators import kind_of_generator, state_of_generator
from helios.core.sharded_tensors import is_sharded
from helios.state_graph import unsupported_values as reasons
from helios.state_graph.graph import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    Cell,
    Graph,
    Table,
)
from helios.state_graph.object_names import has_state, path_of
from helios.state_graph.state_dict_coverage import Coverage
from helios.state_graph.values import (
    ATOMS,
    CONTAINERS,
    FACTORIES,
    SCALARS,
    are_atoms,
    attributes_of,
    flags_in,
    is_plain_object,
    is_single,
)
from helios.storage.type_converters import HeldTensor, NamedMember, Reference, type_name
from helios.text import size_text

KEYS, LIKE = "keys and values", "like"
"""The content of a dict with objects as keys, and an empty dict of its type."""

_CONTENT = ("set", "deleted", "modules", "parameters", "buffers", "removed")
"""What a record of an object or network may say."""

_ABSENT = object()


class LostError(Exception):
    """A value cannot be saved.

    Attributes:
        reason: why, and the remedy.
        way: the keys that lead to the part at fault.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.way: list[str] = []


@final
class Made:
    """What setup made, as far as it is compared.

    Args:
        graph: the graph after setup, which is released.

    Attributes:
        cells, tables, opaque: its nodes, without the objects.
        groups: which tensors and arrays share memory.
        types: the types that loading may build.
        generators: the kinds of generators.
        late: nodes that only a start event makes, so that a resume cannot find them.
    """

    def __init__(self, graph: Graph) -> None:
        self.groups = graph.groups
        self.generators = {name: kind_of_generator(part) for name, part in graph.generators.items()}
        self.cells, self.tables, self.opaque = graph.cells, graph.tables, graph.opaque
        self.types = set(graph.types)
        self.late: set[str] = set()
        graph.release()

    def mark_as_changed(self, nodes: Mapping[str, Any]) -> None:
        """Treat what was restored as changed: the next checkpoint needs it too."""
        for name, record in nodes.items():
            if name in self.cells:
                self.cells[name].digest = b""
            table = self.tables.get(name)
            if table is None:
                continue
            for key in record.get("set", ()):
                slot = table.slots.get(key)
                if isinstance(slot, Cell):
                    slot.digest, slot.part = b"", None
                else:
                    table.slots[key] = _ABSENT
            for key in record.get("deleted", ()):
                table.slots.setdefault(key, _ABSENT)
            _mark_parts_as_changed(table.slots, record)

    def renew(self, now: Graph, losses: Collection[Cell]) -> None:
        """Treat what cannot be saved as unchanged: each start of a run creates it again."""
        self.types |= now.types
        for name, cell in now.opaque.items():
            self.opaque[name] = _without_part(cell)
        for cell in losses:
            if cell.name in now.cells and now.cells[cell.name] is cell:
                self.cells[cell.name] = _without_part(cell)
        lost = set(map(id, losses))
        for name, table in now.tables.items():
            for key, slot in table.slots.items():
                if isinstance(slot, Cell) and (id(slot) in lost or _is_of_hook(key)):
                    old = self.tables.setdefault(name, Table(name, None))
                    old.kind = table.kind
                    old.slots[key] = _without_part(slot)
        self._add_late(now)

    def _add_late(self, now: Graph) -> None:
        """Note what only hooks lead to that were registered by a start event."""
        begins = tuple(
            slot.name
            for table in now.tables.values()
            for key, slot in table.slots.items()
            if _is_of_hook(key) and isinstance(slot, Cell) and slot.name not in self.tables
        )
        for name, cell in now.cells.items():
            if name not in self.cells and f"{name}.".startswith(begins) and begins:
                self.late.add(name)
                self.cells[name] = _without_part(cell)
        for name, table in now.tables.items():
            if name not in self.tables and f"{name}.".startswith(begins) and begins:
                self.late.add(name)
                self.tables[name] = _without_parts(table)


def _mark_parts_as_changed(slots: dict[Any, Any], record: Mapping[str, Any]) -> None:
    if "modules" in record:
        slots[MODULES] = ()
    for part in (PARAMETERS, BUFFERS):
        for key in record.get(part[0].strip("_"), ()):
            slots.get(part, {}).pop(key, None)
    for key in record.get("removed", ()):
        slots.setdefault(BUFFERS, {}).setdefault(key, None)


def _without_parts(table: Table) -> Table:
    twin = Table(table.name, None)
    twin.kind = table.kind
    twin.slots = {
        key: _without_part(slot) if isinstance(slot, Cell) else slot
        for key, slot in table.slots.items()
    }
    return twin


def _without_part(cell: Cell) -> Cell:
    twin = Cell(cell.name, None, cell.place)
    twin.kind, twin.digest, twin.size = cell.kind, cell.digest, cell.size
    return twin


def _is_of_hook(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2


@dataclass
class Changes:
    """What training has changed.

    Attributes:
        nodes: by name, of a container its ``content``; of an object what is ``set`` and ``deleted``
            and its ``type``; of a network the names of its ``modules``, of those ``parameters`` and
            ``buffers`` that are others (``None`` for no tensor, ``False`` for one that is not
            saved), and the buffers ``removed``.
        tensors: the tensors and arrays in nodes, by name; they share the memory that they share.
        generators: ``kind`` and ``state``, by name.
        devices: types of the devices of tensors, by name; those on the CPU are left out.
        missing: the reason why anything else is not saved, by path.
        large: paths of plain values beyond the limit, each with its type.
        others: paths of what no checkpoint can hold, each with its type.
        lost: the cells of the latter.
        misfits: parameters that setup does not make, with what differs, by path.
        reached: places that see more of a storage than what is saved of it.
        places: the nodes and attributes at a place.
        room: bytes left for further plain values.
    """

    nodes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    large: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    lost: list[Cell] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    reached: dict[int, list[str]] = field(default_factory=dict)
    places: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    room: int = 0

    def refuse(self, places: Iterable[str], limit: int) -> None:
        """Report values that are too large, and leave them out."""
        for place in places:
            for name, key in self.places.pop(place, ()):
                if key is _ABSENT:
                    self.nodes.pop(name, None)
                else:
                    self.nodes.get(name, {"set": {}})["set"].pop(key, None)
            self.large.setdefault(place, "memory")
            self.missing.setdefault(place, reasons.TOO_LARGE.format(size_text(limit)))


@dataclass
class _Item:
    """A changed container, or a changed attribute of an object.

    Attributes:
        cell: its value.
        node: the name of the container, or of the object.
        key: the attribute; ``_ABSENT`` for a container.
        code: what is saved.
        targets: the nodes that it refers to.
        tensors: the tensors and arrays in it, by name.
    """

    cell: Cell
    node: str
    key: Any
    code: Any = None
    targets: set[str] = field(default_factory=set)
    tensors: dict[str, Any] = field(default_factory=dict)


@final
class Comparison:
    """Compares what an owner holds with what setup made.

    Args:
        made: what setup made.
        now: what the owner holds.
        limit: maximum bytes.
        safe_types: types that loading may build besides those of the values that setup made.
        covers: what states of objects hold, by the path of the object.
    """

    def __init__(
        self,
        made: Made,
        now: Graph,
        *,
        limit: int,
        safe_types: Iterable[Any] = (),
        covers: Mapping[str, Coverage] | None = None,
    ) -> None:
        self._made = made
        self._now = now
        self._limit = limit
        self._encoder = _Encoder(now, made.types | {k for k in safe_types if isinstance(k, type)})
        self._covered = _covered_places(now, covers or {})
        self._homes = {
            id(slot): (name, key)
            for name, table in now.tables.items()
            for key, slot in table.slots.items()
            if isinstance(slot, Cell) and not _is_of_hook(key)
        }
        self._items: dict[int, _Item] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._new: set[str] = set()
        self.changes = Changes()

    def run(self) -> Changes:
        """Return what has changed."""
        self._find_items()
        self._join_groups()
        lost: dict[str, str] = {}
        for item in list(self._items.values()):
            try:
                item.code = self._encoder.encode(item)
            except LostError as error:
                place = ".".join([item.cell.name, *error.way])
                self._lose(item, f"{place}: {error.reason}" if error.way else error.reason, lost)
        self._lose_holders(lost)
        self._report_opaque()
        self._keep_within_limit()
        self._write()
        changes = self.changes
        for table in (changes.missing, changes.large, changes.others):
            ordered = sorted(table.items())
            table.clear()
            table.update(ordered)
        return changes

    def _find_items(self) -> None:
        made, now = self._made, self._now
        for name, cell in now.cells.items():
            if _has_changed(cell, made.cells.get(name)) and not self._is_covered(cell.place):
                self._add(cell)
        for name, table in now.tables.items():
            self._compare_table(name, table)
        for name in made.tables.keys() - now.tables.keys():
            part = now.views.get(name, now.find(name))
            if isinstance(part, Tensor):
                # Of all nodes, only tensors have no table once they have no attributes.
                self._compare(name, Table(name, part))
        for cell in now.all_cells:
            for storage in cell.reached:
                self.changes.reached.setdefault(storage, []).append(cell.place)

    def _compare_table(self, name: str, table: Table) -> None:
        """Compare an object, unless it still has the very attributes that setup gave it."""
        old = self._made.tables.get(name)
        if old is not None and old.slots is table.slots:
            return
        if name in self._made.late:
            self._compare_late(name, table)
        elif not self._is_late(name, table):
            self._compare(name, table)

    def _is_late(self, name: str, table: Table) -> bool:
        """Return whether an object is reported as a whole, because setup does not make it."""
        is_held = name in self._now.found.objects or name in self._now.found.inner
        is_part = is_held or isinstance(table.part, nn.Module)
        return is_part and name not in self._made.tables

    def _compare_late(self, name: str, table: Table) -> None:
        """Report an object that only a start event makes, which a resume fills in vain."""
        before = self._made.tables[name].slots
        for key in before.keys() | table.slots.keys():
            one, other = before.get(key, _ABSENT), table.slots.get(key, _ABSENT)
            if isinstance(other, Cell):
                has_changed = _has_changed(other, one if isinstance(one, Cell) else None)
            else:
                has_changed = not _are_same(one, other)
            if has_changed:
                self._report(name, table.kind, reasons.LATE)

    def _report(self, path: str, kind: type, reason: str) -> None:
        self.changes.missing[path] = reason
        self.changes.others[path] = kind.__name__

    def _compare(self, name: str, table: Table) -> None:
        old = self._slots_before(name, table)
        before = old or {}
        record = {"set": {}} if old is None else self._compare_parts(name, before, table.slots)
        for key, slot in table.slots.items():
            known = before.get(key, _ABSENT)
            if slot is known or isinstance(key, tuple):
                continue
            if isinstance(slot, Cell):
                is_other = _has_changed(slot, known if isinstance(known, Cell) else None)
                if is_other and not self._is_covered(slot.place):
                    self._add(slot)
            elif not _are_same(known, slot) and not self._is_covered(path_of(name, key)):
                record["set"][key] = slot
        record["deleted"] = [
            key for key in before if key not in table.slots and self._is_gone(name, table.part, key)
        ]
        if name in self._new:
            record["type"] = type_name(table.kind)
        self._records[name] = record

    def _compare_parts(
        self, name: str, before: Mapping[Any, Any], now: Mapping[Any, Any]
    ) -> dict[str, Any]:
        """Begin a record with the parts and tensors of a network that are others than before."""
        record: dict[str, Any] = {"set": {}}
        if MODULES in before and now.get(MODULES) not in (None, before[MODULES]):
            record["modules"] = [list(entry) for entry in now[MODULES]]
        if before.get(BUFFERS) != now.get(BUFFERS):
            old, new = before.get(BUFFERS, {}), now.get(BUFFERS, {})
            changed = {k: v for k, v in new.items() if old.get(k, _ABSENT) != v}
            removed = [k for k, v in old.items() if k not in new and v is not False]
            record |= {"buffers": changed} if changed else {}
            record |= {"removed": removed} if removed else {}
        if before.get(PARAMETERS) != now.get(PARAMETERS):
            old, new = before.get(PARAMETERS, {}), now.get(PARAMETERS, {})
            changed = {k: v for k, v in new.items() if k in old and old[k] != v}
            if not {*changed.values()} <= {*self._now.rules.known.values(), None}:
                self.changes.misfits |= {
                    path_of(name, key): f"it was {_owned(old[key], name, key)}, "
                    f"now {_owned(target, name, key)}"
                    for key, target in changed.items()
                }
            elif changed:
                record["parameters"] = changed
        return record

    def _slots_before(self, name: str, table: Table) -> dict[Any, Any] | None:
        """Return what setup gave an object of this class; note what setup does not make."""
        old = self._made.tables.get(name)
        if old is not None and old.kind is table.kind:
            return old.slots
        now = self._now
        if not name:
            if old is not None:
                self._report("__class__", table.kind, reasons.OF_OWNER)
        elif name in now.views or name in now.generators:
            # Saved by itself.
            pass
        elif id(table.part) not in now.rules.known or is_plain_object(table.kind):
            self._new.add(name)
        return None

    def _is_gone(self, name: str, part: Any, key: Any) -> bool:
        if isinstance(key, tuple) or self._is_covered(path_of(name, key)):
            return False
        if isinstance(part, nn.Module) and key in vars(part).get("_buffers", ()):
            return False
        return key not in (part if issubclass(type(part), dict) else attributes_of(part))

    def _is_covered(self, place: str) -> bool:
        """Return whether the state of an object holds the attribute at a place."""
        found = self._covered.get(place)
        if found is None:
            return False
        cover, key, value = found
        return cover.has(key, value) or (type(value) not in ATOMS and cover.has_copy(key, value))

    def _add(self, cell: Cell) -> None:
        """Add what has changed: a container, or an attribute of an object."""
        if id(cell) in self._items:
            return
        name, key = self._homes.get(id(cell), (cell.name, _ABSENT))
        if name in self._made.late:
            if key is _ABSENT:
                self._report(name, cell.kind, reasons.LATE)
            return
        if key is _ABSENT and cell.name not in self._made.cells:
            self._new.add(name)
        self._items[id(cell)] = _Item(cell, name, key)

    def _join_groups(self) -> None:
        """Add all that shares memory with what has changed, or shares it otherwise than before."""
        before, now = self._made.groups, self._now.groups
        holders = {cell.name: cell for cell in self._now.all_cells if cell.num_views}
        for name in sorted(before.keys() | now.keys()):
            members = [holders[entry[0].rpartition("#")[0]] for entry in now.get(name, ())]
            if before.get(name) != now.get(name):
                members += [holders[name.rpartition("#")[0]]] if name in self._now.views else []
            elif not any(id(member) in self._items for member in members):
                continue
            for member in members:
                if not self._is_covered(member.place):
                    self._add(member)

    # ---- what cannot be saved

    def _lose(self, item: _Item, reason: str, lost: dict[str, str]) -> None:
        """Leave out an item; what setup does not make is reported with what refers to it."""
        del self._items[id(item.cell)]
        if item.node in self._new:
            lost.setdefault(item.node, reason)
            return
        self.changes.lost.append(item.cell)
        if reason:
            self._report(item.cell.name, item.cell.kind, reason)

    def _lose_holders(self, lost: dict[str, str]) -> None:
        """Lose what refers to new nodes that cannot be saved."""
        done: set[str] = set()
        while waiting := lost.keys() - done:
            done |= waiting
            for item in list(self._items.values()):
                gone = sorted(item.targets & waiting)
                if gone or item.node in waiting:
                    self._lose(item, lost[gone[0]] if gone else "", lost)

    def _report_opaque(self) -> None:
        for name, cell in self._now.opaque.items():
            old = self._made.opaque.get(name)
            is_known = id(cell.part) in self._now.rules.known
            if old is None or not is_known or not _has_changed(cell, old):
                # What is new is reported with what refers to it.
                continue
            if self._is_covered(cell.place):
                continue
            self.changes.lost.append(cell)
            self._report(name, cell.kind, why_unsavable(cell.part))

    def _keep_within_limit(self) -> None:
        """Leave out the largest attributes beyond the limit, with all that shares with them."""
        joined = self._joined_places()
        totals: dict[str, int] = defaultdict(int)
        for item in self._items.values():
            if self._now.target_of(item.cell) in (None, item.node):
                totals[joined.root(item.cell.place)] += item.cell.size
        left, dropped = self._limit, set()
        for root, size in sorted(totals.items(), key=lambda entry: (entry[1], entry[0])):
            if size > left:
                dropped.add(root)
            else:
                left -= size
        for item in list(self._items.values()):
            if joined.root(item.cell.place) in dropped:
                del self._items[id(item.cell)]
                self.changes.lost.append(item.cell)
                self._refuse(item.cell)
        self.changes.room = left

    def _joined_places(self) -> _Joined:
        """Return which attributes share nodes or memory."""
        joined = _Joined()
        nodes = {item.node: item.cell.place for item in self._items.values()}
        for item in self._items.values():
            for target in item.targets & nodes.keys():
                joined.join(item.cell.place, nodes[target])
        for group in self._now.groups.values():
            places = [self._attribute_of(entry[0]) for entry in group]
            for place in places[1:]:
                joined.join(places[0], place)
        return joined

    def _attribute_of(self, name: str) -> str:
        return self._places.get(name.rpartition("#")[0], name)

    @cached_property
    def _places(self) -> dict[str, str]:
        return {cell.name: cell.place for cell in self._now.all_cells}

    def _refuse(self, cell: Cell) -> None:
        place = cell.place
        if cell.name == place or place not in self.changes.large:
            self.changes.large[place] = cell.kind.__name__
        self.changes.missing[place] = reasons.TOO_LARGE.format(size_text(self._limit))

    # ---- what is saved

    def _write(self) -> None:
        reached: set[str] = set()
        waiting = {item.node for item in self._items.values()} | self._records.keys()
        waiting -= self._new
        while waiting:
            reached |= waiting
            targets = [item.targets for item in self._items.values() if item.node in waiting]
            waiting = set().union(*targets) - reached
        for item in self._items.values():
            if item.node in reached:
                self._write_item(item)
                self.changes.tensors |= item.tensors
        self.changes.devices = {
            name: part.device.type
            for name, part in self.changes.tensors.items()
            if isinstance(part, Tensor) and not part.is_cpu
        }
        for name, record in self._records.items():
            has_content = any(record.get(key) for key in _CONTENT)
            if name in reached and (has_content or name in self._new):
                self.changes.nodes[name] = record
        for name, generator in self._now.generators.items():
            kind = kind_of_generator(generator)
            if name in reached or self._made.generators.get(name) == kind:
                state = state_of_generator(generator)
                self.changes.generators[name] = {"kind": kind, "state": state}

    def _write_item(self, item: _Item) -> None:
        self.changes.places.setdefault(item.cell.place, []).append((item.node, item.key))
        if item.key is _ABSENT:
            self.changes.nodes[item.node] = {"content": item.code}
        else:
            self._records[item.node]["set"][item.key] = item.code


@final
class _Joined:
    """Places that are saved together, or not at all."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, place: str) -> str:
        while (parent := self._parents.get(place, place)) != place:
            place = parent
        return place

    def join(self, one: str, other: str) -> None:
        self._parents[self.root(one)] = self.root(other)


@final
class _Encoder:
    """Replaces nodes in values by their names.

    Args:
        now: what the owner holds.
        types: the types that loading may build.
    """

    def __init__(self, now: Graph, types: Collection[type]) -> None:
        self._now = now
        self._types = types
        self._item = _Item(Cell("", None, ""), "", _ABSENT)

    def encode(self, item: _Item) -> Any:
        """Return what a file contains of a container or attribute.

        Raises:
            LostError: if no checkpoint can hold it.
        """
        self._item = item
        if obstacle := self._now.obstacles.get(id(item.cell)):
            raise LostError(obstacle)
        value = item.cell.part
        return self._content(value) if item.key is _ABSENT else self._code(value)

    def _members(self, members: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the codes of members, each after the key that leads to it."""
        codes: list[Any] = []
        for key, member in members:
            kind = type(member)
            if kind in ATOMS or (kind in SCALARS and not member.dtype.hasobject):
                codes.append(member)
                continue
            try:
                codes.append(self._code(member))
            except LostError as error:
                error.way.insert(0, str(key))
                raise
        return codes

    def _content(self, part: Any) -> Any:
        if isinstance(part, dict):
            return self._content_of_dict(part)
        if are_atoms(part):
            return part
        if isinstance(part, set) and any(isinstance(member, Tensor) for member in part):
            # Identity alone would find it again, and no checkpoint keeps that.
            raise LostError(reasons.IN_SET)
        members = self._members(enumerate(part))
        return deque(members, part.maxlen) if type(part) is deque else type(part)(members)

    def _content_of_dict(self, part: dict[Any, Any]) -> Any:
        if getattr(part, "default_factory", None) not in FACTORIES:
            raise LostError(reasons.FACTORY)
        if are_atoms(part) and are_atoms(part.values()):
            return part
        keys = self._members((key, key) for key in part)
        pairs = list(zip(keys, self._members(part.items()), strict=True))
        like = copy.copy(part)
        like.clear()
        if isinstance(like, OrderedDict):
            vars(like).update(vars(part))
        if any(isinstance(key, Reference) for key, _ in pairs):
            return {KEYS: pairs, LIKE: like}
        for key, value in pairs:
            like[key] = value
        return like

    def _code(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind is tuple or kind is frozenset:
            members = self._members(enumerate(value))
            return value if all(map(is_, members, value)) else kind(members)
        if kind in ATOMS or is_single(value):
            return value
        if kind in SCALARS:
            if value.dtype.hasobject:
                raise LostError(reasons.IN_SCALAR)
            return value
        if kind in CONTAINERS:
            number = id(value)
            return self._refer(self._now.soft.get(number) or self._now.found.outside_names[number])
        if isinstance(value, Enum):
            return self._member(value)
        if kind is RemovableHandle:
            raise LostError(reasons.HOOK)
        name = self._now.soft.get(id(value)) or self._now.found.name_of(id(value))
        return self._view(value) if name is None else self._object(name, value)

    def _refer(self, name: str) -> Reference:
        self._item.targets.add(name)
        return Reference(name)

    def _object(self, name: str, value: Any) -> Reference:
        now = self._now
        is_known = id(value) in now.rules.known or id(value) in now.found.outside_names
        if is_known or name == "" or name in now.generators:
            return self._refer(name)
        if has_state(value) or (isinstance(value, Tensor) and name in now.found.loose):
            # Reported by its own name.
            raise LostError("" if name == self._item.cell.name else reasons.LATE)
        if isinstance(value, Tensor) and name not in now.opaque:
            return self._refer(name)
        if name in now.tables and is_plain_object(type(value)):
            if type(value) not in self._types:
                raise LostError(reasons.UNKNOWN.format(type_name(type(value))))
            return self._refer(name)
        raise LostError(why_unsavable(value))

    def _member(self, value: Enum) -> NamedMember:
        kind = type(value)
        names = flags_in(value) if isinstance(value, Flag) else [value.name]
        if names is None:
            raise LostError(reasons.FLAGS.format(value))
        if kind not in self._types:
            raise LostError(reasons.UNKNOWN.format(type_name(kind)))
        return NamedMember(type_name(kind), tuple(names), is_flag=isinstance(value, Flag))

    def _view(self, value: Any) -> Any:
        """Return a tensor or array, or where it is in the memory of a saved one."""
        if obstacle := self._now.obstacles.get(id(value)):
            raise LostError(obstacle)
        if isinstance(value, Tensor):
            if not value.is_leaf:
                raise LostError(reasons.GRAPH)
            if type(value) is not Tensor:
                # It would be restored as a tensor.
                raise LostError(reasons.STRAY_PARAMETER.format(type(value).__name__))
        alias = self._now.aliases.get(id(value))
        return self._tensor_code(self._now.view_names[id(value)], value) if alias is None else alias

    def _tensor_code(self, name: str, value: Any) -> HeldTensor:
        self._item.tensors[name] = value
        return HeldTensor(name)

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        number = id(value)
        view = self._now.view_names.get(number)
        if view is not None and number not in self._now.obstacles:
            return self._tensor_code(view, value)
        if value.dtype != object:
            name = self._now.found.name_of(number)
            return self._view(value) if name is None else self._object(name, value)
        twin = np.empty(value.size, dtype=object)
        for place, code in enumerate(self._members(enumerate(value.reshape(-1).tolist()))):
            twin[place] = code
        return twin.reshape(value.shape)


def why_unsavable(part: Any) -> str:
    """Return why no checkpoint can hold an object, and the remedy."""
    if isinstance(part, np.memmap):
        return reasons.MAPPED
    if isinstance(part, io.IOBase):
        return reasons.FILE
    if is_sharded(part):
        return reasons.SHARDED
    if isinstance(part, Tensor):
        return reasons.NO_STORAGE.format(part.layout)
    return reasons.without_state(part)


def _covered_places(
    now: Graph, covers: Mapping[str, Coverage]
) -> dict[str, tuple[Coverage, Any, Any]]:
    """Return the attributes of objects whose states may hold them, by path.

    A value that several attributes refer to stays one object only if all are saved together.
    """
    counts = Counter(
        id(slot.part)
        for table in now.tables.values()
        for slot in table.slots.values()
        if isinstance(slot, Cell)
    )
    places: dict[str, tuple[Coverage, Any, Any]] = {}
    for path, cover in covers.items():
        table = now.tables.get(path)
        for key, slot in table.slots.items() if table is not None else ():
            value = slot.part if isinstance(slot, Cell) else slot
            name = now.soft.get(id(value), "")
            is_shared = isinstance(slot, Cell) and (
                counts[id(value)] > 1 or now.num_references.get(name, 0) > 1
            )
            if not isinstance(key, tuple) and not is_shared:
                places[path_of(path, key)] = cover, key, value
    return places


def _owned(target: str | None, name: str, key: str) -> str:
    return "a tensor of its own" if target == path_of(name, key) else str(target)


def _has_changed(now: Cell, old: Cell | None) -> bool:
    return old is None or old.digest != now.digest or old.kind is not now.kind


def _are_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)

"""Converts states of earlier schemas: values by container to nodes, and where tensors lie.

Pure functions of data: no object of a run is needed, and the old state is not changed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from helios.storage.type_converters import Alias, HeldTensor, NamedFields, NamedMember, Reference

_TAKEN_APART = (list, dict, set, deque, NamedFields)
_DEFAULTS: dict[str, Any] = {
    **{key: {} for key in ("forms", "ties", "omitted", "tables", "inner", "missing", "misfits")},
    "blocks": None,
    "is_partial": False,
}
_OLD_PLACES = ("aliases", "orders", "generators")


def upgrade_state(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of schema 3 for one of schema 2; a state of user code stays as it is."""
    if "objects" not in old or "values" not in old:
        return dict(old)
    kept = {key: value for key, value in old.items() if key not in _OLD_PLACES}
    return _DEFAULTS | kept | {"values": upgrade_values(old["values"], old)}


def lay_out_tensors(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of schema 4 for one of schema 3; a state of user code stays as it is."""
    if "objects" not in old or "forms" not in old:
        return dict(old)
    kept = {key: value for key, value in old.items() if key not in ("forms", "ties", "blocks")}
    nodes = {name: dict(record) for name, record in old["values"]["nodes"].items()}
    forms: list[str] = []
    for path, table in old["forms"].items():
        forms += (f"{path}.{name}" if path else name for name in table["tensors"])
        for place, kinds in table["buffers"].items():
            name = f"{path}.{place}" if place else path
            record = nodes.setdefault(name, {"set": {}, "deleted": []})
            record["removed"] = [key for key, kind in kinds.items() if kind is None]
            # A buffer is persistent or not, and a tensor or none.
            record["buffers"] = {
                key: False if not kind[0] else None if kind[1] else f"{name}.{key}"
                for key, kind in kinds.items()
                if kind is not None
            }
    homes = None if old["blocks"] is None else dict(old["blocks"])
    _add_ties(old, nodes, homes if homes is not None else {})
    parted = [name for name, tie in old["ties"].items() if tie is None]
    # One that setup makes the same as another one has no form of its own there.
    forms += parted
    layouts = {"forms": forms, "homes": homes, "parted": parted}
    return kept | {"layouts": layouts, "values": {**old["values"], "nodes": nodes}}


def _add_ties(old: Mapping[str, Any], nodes: dict[str, Any], homes: dict[str, Any]) -> None:
    """Add tensors with the elements of another one: the same buffer, or a view of its memory."""
    states = {**old["objects"], **old.get("inner", {})}
    saved = {
        f"{path}.{name}": part for path, table in states.items() for name, part in table.items()
    }
    for name, tie in old["ties"].items():
        if tie is None or tie[1]:
            module, _, key = name.rpartition(".")
            record = nodes.setdefault(module, {"set": {}, "deleted": []})
            record["buffers"] = {**record.get("buffers", {}), key: tie[0] if tie else name}
            continue
        first = saved.get(tie[0])
        if not isinstance(first, Tensor):
            continue
        place = tuple(first.shape), first.stride(), int(first.storage_offset())
        size = first.untyped_storage().nbytes() // first.element_size()
        whole = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage(), 0, (size,), (1,))
        home = {"members": {tie[0]: place}, "memory": whole, "tail": torch.empty(0).byte()}
        homes.setdefault(tie[0], home)["members"][name] = place


def upgrade_values(values: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values as nodes.

    Args:
        values: ``changed`` values and ``deleted`` keys by container, and ``devices``.
        places: ``aliases``, ``orders`` and ``generators``.
    """
    nodes = _Nodes()
    for parent, members in values["changed"].items():
        for key, value in members.items():
            nodes.set(parent, key, value)
    for parent, keys in values["deleted"].items():
        nodes.record(parent)["deleted"] += keys
    _add_places(nodes, places)
    generators = {}
    for name, saved in places.get("generators", {}).items():
        generators[name] = {key: saved[key] for key in ("kind", "state")}
        if saved.get("home"):
            parent, key = saved["home"]
            nodes.record(parent)["set"].setdefault(key, Reference(name))
    return {
        "nodes": nodes.nodes,
        "tensors": nodes.tensors,
        "devices": _devices_by_name(values, nodes.names),
        "generators": generators,
    }


def _add_places(nodes: _Nodes, places: Mapping[str, Any]) -> None:
    """Add references to objects, and the order of keys."""
    aliases = places.get("aliases", {"set": {}, "deleted": {}, "lengths": {}})
    for parent, names in aliases["set"].items():
        for key, name in sorted(names.items(), key=lambda item: str(item[0]).zfill(20)):
            nodes.record(parent)["set"][key] = Reference(name)
    for parent, keys in aliases["deleted"].items():
        nodes.record(parent)["deleted"] += keys
    for parent, length in aliases["lengths"].items():
        nodes.record(parent)["length"] = length
    for parent, keys in places.get("orders", {}).items():
        nodes.record(parent)["order"] = list(keys)


@final
class _Nodes:
    """Takes nested values apart: each container, object, tensor and array gets a name."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self._cell = ""
        self._count = 0

    def record(self, parent: str) -> dict[str, Any]:
        """Return the record of what is set and deleted in a container or object."""
        name = parent.rstrip("/")
        record: dict[str, Any] = self.nodes.setdefault(name, {"set": {}, "deleted": []})
        return record

    def set(self, parent: str, key: Any, value: Any) -> None:
        """Set a member of a container or object."""
        path = _path_of(parent, key)
        self.record(parent)["set"][key] = self._in_cell(path, value)

    def _in_cell(self, path: str, value: Any) -> Any:
        before = self._cell, self._count
        self._cell, self._count = path, 0
        code = self._code(path, value)
        self._cell, self._count = before
        return code

    def _code(self, path: str, value: Any) -> Any:
        if isinstance(value, Alias | NamedMember):
            return value
        if isinstance(value, _TAKEN_APART):
            return Reference(self.names.get(id(value)) or self._split(path, value))
        if type(value) in (tuple, frozenset):
            members = [self._code(f"{path}.{n}", member) for n, member in enumerate(value)]
            return type(value)(members)
        if type(value) is np.ndarray and value.dtype == object:
            twin = np.empty(value.size, dtype=object)
            for number, member in enumerate(value.reshape(-1).tolist()):
                twin[number] = self._code(f"{path}.{number}", member)
            return twin.reshape(value.shape)
        if isinstance(value, Tensor | np.ndarray):
            return HeldTensor(self.names.get(id(value)) or self._name_tensor(value))
        return value

    def _name_tensor(self, value: Any) -> str:
        name = self.names[id(value)] = f"{self._cell}#{self._count}"
        self._count += 1
        self.tensors[name] = value
        return name

    def _split(self, path: str, value: Any) -> str:
        while path in self.nodes:
            path += " (new)"
        self.names[id(value)] = path
        if isinstance(value, NamedFields):
            record: dict[str, Any] = {"set": {}, "deleted": [], "type": value.type}
            self.nodes[path] = record
            for name, part in value.fields.items():
                record["set"][name] = self._in_cell(f"{path}.{name}", part)
            return path
        self.nodes[path] = {}
        before = self._cell, self._count
        self._cell, self._count = path, 0
        self.nodes[path] = {"content": self._content(path, value)}
        self._cell, self._count = before
        return path

    def _content(self, path: str, value: Any) -> Any:
        if not isinstance(value, dict):
            members = [self._code(f"{path}.{n}", member) for n, member in enumerate(value)]
            is_deque = isinstance(value, deque)
            return deque(members, value.maxlen) if is_deque else type(value)(members)
        twin = (
            type(value)(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        )
        if isinstance(value, OrderedDict):
            vars(twin).update(vars(value))
        for key, part in value.items():
            twin[self._code(f"{path}.{key}", key)] = self._code(f"{path}.{key}", part)
        return twin


def _path_of(parent: str, key: Any) -> str:
    return f"{parent.rstrip('/')}.{key}" if parent else str(key)


def _devices_by_name(values: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, str]:
    """Return the devices of tensors by name, which schema 2 lists in the order of values."""
    devices = values.get("devices") or []
    tensors = _tensors_in(values["changed"]) if devices else ()
    pairs = zip(tensors, devices, strict=False)
    return {names[id(part)]: device for part, device in pairs if device != "cpu"}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, dict):
            waiting += reversed([*part.keys(), *part.values()])
        elif isinstance(part, NamedFields):
            waiting += reversed([*part.fields.values()])
        elif isinstance(part, list | tuple | set | frozenset | deque):
            waiting += reversed([*part])
        elif isinstance(part, np.ndarray) and part.dtype == object:
            waiting += reversed(part.reshape(-1).tolist())

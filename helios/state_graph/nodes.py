"""Fills the nodes of a graph with what a checkpoint holds of them, in place.

Objects that exist are kept, so that references to them stay valid. What setup does not make is
created without running any code of its class.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import is_, or_
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from helios.core.generators import kind_of_generator, load_generator, make_generator
from helios.core.memory import array_on, bytes_in, root_of, tensor_on
from helios.core.wrappers import unwrap
from helios.errors import StateError
from helios.state_graph.changes import KEYS, LIKE
from helios.state_graph.graph import Cell, Graph
from helios.state_graph.memory_groups import copies_of, groups_of, layout_of, write_elements
from helios.state_graph.object_names import path_of
from helios.state_graph.values import (
    ATOMS,
    delete_attribute,
    make_bare,
    refill,
    set_attribute,
    slots_of,
)
from helios.storage.type_converters import Alias, HeldTensor, NamedMember, Reference, type_name


@final
class Nodes:
    """The nodes of a checkpoint, and those that the owner has now.

    Args:
        saved: ``nodes``, ``tensors``, ``devices`` and ``generators``.
        live: what the owner holds.
        types: types that may be built.
        may_set: whether a key of a node may be set.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        live: Graph,
        types: Iterable[Any],
        may_set: Callable[[str, Any], bool],
    ) -> None:
        self._saved = saved
        self._live = live
        self._types = {type_name(kind): kind for kind in types if isinstance(kind, type)}
        self._may_set = may_set
        self._built: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        self._aliases: dict[int, Any] = {}
        self._place = ""

    def find_lacking(self) -> list[str]:
        """Return the objects that nodes are of, or refer to, and that do not exist now.

        Raises:
            StateError: for a type that is not known, or that has changed.
        """
        nodes = self._saved["nodes"]
        own = self._saved["generators"].keys() | self._saved["tensors"].keys()
        known = nodes.keys() | own
        lacking: set[str] = set()
        for name, record in nodes.items():
            targets = record.get("parameters", {}).values()
            lacking |= {name for name in targets if name and self._find(name) is None}
            if "content" not in record and name not in own and self._part_of(name) is None:
                if "type" not in record:
                    lacking.add(name)
                else:
                    self._check_type(name, record)
            for place, code in _codes_in(name, record):
                self._place = place
                if isinstance(code, Reference) and code.name not in known:
                    if self._find(code.name) is None:
                        lacking.add(code.name)
                elif isinstance(code, NamedMember):
                    self._member(code)
        return sorted(lacking)

    def restore(self) -> None:
        """Create what is new, then fill everything.

        Raises:
            StateError: if a value does not fit.
        """
        nodes = self._saved["nodes"]
        for name, record in nodes.items():
            for self._place, code in _codes_in(name, record):
                if isinstance(code, Alias):
                    self._aliases[id(code)] = self._look_at_target(code)
        for name, saved in self._saved["generators"].items():
            present = self._live.generators.get(name)
            if present is None or kind_of_generator(present) != saved["kind"]:
                present = self._built[name] = make_generator(saved["kind"])
            load_generator(present, saved["state"])
        self._restore_tensors()
        for name, record in nodes.items():
            self._built.setdefault(name, self._shell(name, record))
        for name, record in nodes.items():
            self._place = name
            part = self._built[name]
            if "content" in record:
                self._fill(part, record["content"])
            elif part is not None:
                self._set_members(name, part, record)

    def _part_of(self, name: str) -> Any:
        for parts in (self._tensors, self._live.views, self._live.generators):
            if name in parts:
                return parts[name]
        table = self._live.tables.get(name)
        return self._live.find(name) if table is None else table.part

    def _find(self, name: str) -> Any:
        return self._live.tables[""].part if name == "" else self._live.find(name)

    # ---- tensors and arrays

    def _restore_tensors(self) -> None:
        """Write tensors and arrays into those of setup that have the same form, and copy others."""
        saved, live = self._saved["tensors"], self._live.views
        before, now = self._live.groups, groups_of(saved)
        others = {}
        for name, part in saved.items():
            present = live.get(name)
            is_alike = before.get(name) == now.get(name) and _fits(present, part)
            if is_alike and all(_fits(live.get(e[0]), saved[e[0]]) for e in now.get(name, ())):
                write_elements(present, part)
                self._tensors[name] = present
            else:
                others[name] = part
        for name, part in copies_of(others).items():
            self._tensors[name] = _put_into(live.get(name), self._on_device(name, part))

    def _on_device(self, name: str, part: Any) -> Any:
        device = self._saved["devices"].get(name)
        if device is None or not torch.accelerator.is_available():
            return part
        present = torch.accelerator.current_accelerator()
        if present is None or present.type != device:
            return part
        return part.detach().to(device).requires_grad_(part.requires_grad)

    # ---- nodes

    def _check_type(self, name: str, record: Mapping[str, Any]) -> None:
        kind = self._types.get(record["type"])
        if kind is None:
            raise StateError(
                f"{name} was saved with a {record['type']}, which is not known here: types come "
                "from the values that setup() makes, never from a file. Create such a value in "
                "setup(), or return the type from types_for_safe_load()."
            )
        held = set(record["set"])
        fields = {each.name for each in dataclasses.fields(kind)} if _is_record(kind) else held
        is_open = "__dict__" in dir(kind)
        if fields != held or not (is_open or held <= slots_of(kind).keys()):
            present = fields if _is_record(kind) else slots_of(kind).keys()
            raise StateError(
                f"{name} was saved with the fields {sorted(held)} of {record['type']}, which has "
                f"{sorted(present)} now. Restore the fields that it had."
            )

    def _shell(self, name: str, record: Mapping[str, Any]) -> Any:
        """Return what setup has made of a node, or a new object without content."""
        present = self._part_of(name)
        if "content" in record:
            like = record["content"]
            like = like[LIKE] if _has_keys(like) else like
            if type(present) is type(like) and _maxlen(present) == _maxlen(like):
                return present
            return deque(maxlen=like.maxlen) if isinstance(like, deque) else _emptied(like)
        kind = self._types.get(record.get("type", ""))
        if present is not None and (kind is None or kind is type(present) or not name):
            return present
        if kind is None or isinstance(present, nn.Module | Tensor):
            return present
        return make_bare(kind)

    def _fill(self, part: Any, code: Any) -> None:
        if isinstance(part, dict):
            pairs = code[KEYS] if _has_keys(code) else code.items()
            like = code[LIKE] if _has_keys(code) else code
            refill(part, [(self.decode(key), self.decode(value)) for key, value in pairs])
            if isinstance(part, defaultdict):
                part.default_factory = like.default_factory
            if isinstance(part, OrderedDict):
                vars(part).update(copy.deepcopy(vars(like)))
            return
        refill(part, [self.decode(member) for member in code])

    def _set_members(self, name: str, part: Any, record: Mapping[str, Any]) -> None:
        for key, code in record.get("set", {}).items():
            self._place = path_of(name, key)
            if self._may_set(name, key):
                self._set(part, key, self.decode(code))
        for key in reversed(record.get("deleted", ())):
            if self._may_set(name, key):
                _delete(part, self._key(part, key))
        if issubclass(type(part), list) and "length" in record:
            del part[record["length"] :]
        if issubclass(type(part), dict) and "order" in record:
            keys = [self._key(part, key) for key in record["order"]]
            for key in [key for key in keys if key in part]:
                part[key] = part.pop(key)

    def _set(self, part: Any, key: Any, value: Any) -> None:
        if isinstance(part, nn.Module) and key in vars(part).get("_buffers", ()):
            vars(part)["_buffers"][key] = value
        elif issubclass(type(part), list):
            # The members before it may be put there later.
            part += [None] * (key + 1 - len(part))
            part[key] = value
        elif issubclass(type(part), dict):
            part[self._key(part, key)] = value
        else:
            set_attribute(part, key, value)

    def _key(self, part: Any, key: Any) -> Any:
        """Return the key of a dict, of which a file may hold the name of an object."""
        if (
            not issubclass(type(part), dict)
            or not isinstance(key, str)
            or key[:1] + key[-1:] != "<>"
        ):
            return key
        found = self._live.find(key[1:-1])
        if found is None and key[1:-1].isdigit() and int(key[1:-1]) < len(part):
            found = list(part)[int(key[1:-1])]
        return found if isinstance(found, Tensor | nn.Module) else key

    # ---- values

    def decode(self, code: Any) -> Any:
        """Return a value with nodes, tensors and members of enums in place of their names."""
        kind = type(code)
        if kind in ATOMS:
            return code
        if kind is Reference:
            return self._resolve(code.name)
        if kind is HeldTensor:
            return self._tensors[code.name]
        if kind is Alias:
            return self._aliases[id(code)]
        if kind is NamedMember:
            return self._member(code)
        if kind is tuple or kind is frozenset:
            members = [self.decode(member) for member in code]
            return code if all(map(is_, members, code)) else kind(members)
        if kind is np.ndarray and code.dtype == object:
            twin = np.empty(code.size, dtype=object)
            for number, member in enumerate(code.reshape(-1).tolist()):
                twin[number] = self.decode(member)
            return twin.reshape(code.shape)
        return code

    def _resolve(self, name: str) -> Any:
        found = self._built.get(name)
        found = self._find(name) if found is None else found
        if found is None:
            raise StateError(
                f"{self._place} referred to {name}, which does not exist now. Create it in setup() "
                "as it was when the state was saved."
            )
        return found

    def _member(self, code: NamedMember) -> Any:
        kind: Any = self._types.get(code.type)
        if kind is None:
            raise StateError(
                f"{self._place} was saved with a {code.type}, which is not known here: types come "
                "from the values that setup() makes, never from a file. Create such a value in "
                "setup(), or return the type from types_for_safe_load()."
            )
        unknown = [name for name in code.names if name not in kind.__members__]
        if unknown:
            raise StateError(
                f"{self._place} was saved as {code.type}.{unknown[0]}, which that enum no longer "
                f"has. Add the member {unknown[0]}."
            )
        members = [kind[name] for name in code.names]
        return reduce(or_, members, kind(0)) if code.is_flag else members[0]

    def _look_at_target(self, code: Alias) -> Any:
        target = self._live.storages.tensor(code.target)
        if target is None:
            raise StateError(
                f"{self._place} shared its memory with {code.target}, which does not exist now. "
                "Build it in setup() as it was when the state was saved."
            )
        if code.way == "itself":
            return target
        try:
            return _on_target(code, target)
        except (ValueError, RuntimeError, TypeError) as error:
            raise StateError(
                f"{self._place} was a view of {code.target} that no longer fits: {error}. Build it "
                "in setup() as it was when the state was saved."
            ) from error


def restructure(nodes: Mapping[str, Any], live: Graph) -> bool:
    """Give networks the parts and tensors that they had; new buffers have no form yet.

    Args:
        nodes: saved nodes.
        live: what setup has made.

    Returns:
        Whether anything was changed.
    """
    made: dict[str, Tensor] = {}
    parts = live.found.parts
    telling = ("order", "modules", "parameters", "buffers", "removed")
    changed = [(name, record) for name, record in nodes.items() if any(map(record.get, telling))]
    for name, record in changed:
        module = live.find(name)
        if isinstance(module, nn.Module):
            _order_modules(module, record, live)
            table = vars(module)["_parameters"]
            found = {key: parts.get(target) for key, target in record.get("parameters", {}).items()}
            table |= {key: part for key, part in found.items() if key in table}
            _register(module, record, parts, made)
    return bool(changed)


def _order_modules(module: nn.Module, record: Mapping[str, Any], live: Graph) -> None:
    table = vars(module)["_modules"]
    for key in [key for key in record.get("order", ()) if key in table]:
        table[key] = table.pop(key)
    kids = {key: kid and live.find(kid) for key, kid in record.get("modules", ())}
    if kids and all(kids[key] is not None or kid is None for key, kid in record["modules"]):
        wrapped = {id(unwrap(kid)): kid for kid in table.values()}
        table.clear()
        table.update((key, wrapped.get(id(unwrap(kid)), kid)) for key, kid in kids.items())


def _register(
    module: nn.Module, record: Mapping[str, Any], parts: Mapping[str, Any], made: dict[str, Tensor]
) -> None:
    table = vars(module)["_buffers"]
    for key in record.get("removed", ()):
        table.pop(key, None)
        vars(module)["_non_persistent_buffers_set"].discard(key)
    tensors = (part for part in parts.values() if isinstance(part, Tensor))
    for key, name in record.get("buffers", {}).items():
        vars(module).pop(key, None)
        module.register_buffer(key, table.get(key), persistent=name is not False)
        if name is None:
            table[key] = None
        elif name is not False and parts.get(name) is None and name not in made:
            device = next((part.device for part in tensors), None)
            table[key] = made[name] = torch.empty(0, device=device)
        elif name is not False:
            table[key] = made.get(name, parts.get(name))


def link_again(before: Graph, now: Graph) -> bool:
    """Let attributes refer again to what loading has replaced.

    Args:
        before: what the owner held before states were loaded.
        now: what it holds.

    Returns:
        Whether anything was linked.
    """
    has_changed = False
    for name, table in before.tables.items():
        present = now.tables.get(name)
        for key, slot in table.slots.items() if present is not None else ():
            target = before.target_of(slot) if isinstance(slot, Cell) else None
            if present is None or not isinstance(slot, Cell) or target in (None, slot.name):
                continue
            other, found = present.slots.get(key), now.find(target or "")
            was_linked = unwrap(before.find(target or "")) is unwrap(slot.part)
            if was_linked and isinstance(other, Cell) and _are_apart(other.part, found):
                _put_back(present.part, key, found)
                has_changed = True
    return has_changed


def _are_apart(one: Any, other: Any) -> bool:
    return type(one) is type(other) and unwrap(one) is not unwrap(other)


def _put_back(part: Any, key: Any, value: Any) -> None:
    if issubclass(type(part), dict):
        part[key] = value
    else:
        set_attribute(part, key, value)


def _codes_in(name: str, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what stands for something else in a record, with the path of its place."""
    waiting: list[tuple[str, Any]] = [
        (path_of(name, k), c) for k, c in record.get("set", {}).items()
    ]
    if "content" in record:
        code = record["content"]
        if isinstance(code, dict):
            pairs = code[KEYS] if _has_keys(code) else code.items()
            waiting += [(name, part) for pair in pairs for part in pair]
        else:
            waiting += [(name, part) for part in code]
    while waiting:
        place, code = waiting.pop()
        if isinstance(code, Alias | Reference | NamedMember):
            yield place, code
        elif isinstance(code, tuple | frozenset) and type(code) in (tuple, frozenset):
            waiting += [(place, part) for part in code]
        elif type(code) is np.ndarray and code.dtype == object:
            waiting += [(place, part) for part in code.reshape(-1).tolist()]


def _has_keys(code: Any) -> bool:
    return isinstance(code, dict) and code.keys() == {KEYS, LIKE}


def _maxlen(part: Any) -> int | None:
    return part.maxlen if isinstance(part, deque) else None


def _emptied(like: Any) -> Any:
    shell = copy.copy(like)
    shell.clear()
    return shell


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind)


def _fits(present: Any, part: Any) -> bool:
    """Return whether the content of a saved tensor or array may be written into one of setup."""
    if present is None or layout_of(present) != layout_of(part):
        return False
    if isinstance(present, Tensor):
        return not present.is_inference()
    return bool(present.flags.writeable) and not isinstance(root_of(present), mmap.mmap)


def _put_into(present: Any, part: Any) -> Any:
    """Give a tensor of setup, to which closures may refer, the memory and form of another one."""
    is_open = type(present) is type(part) is Tensor and present.is_leaf and part.is_leaf
    if not is_open or present.device != part.device or present.is_inference():
        return part
    present.requires_grad_(False)
    present.data = part.detach()
    return present.requires_grad_(part.requires_grad)


def _delete(part: Any, key: Any) -> None:
    if isinstance(part, nn.Module) and key in vars(part).get("_buffers", ()):
        delattr(part, key)
    elif issubclass(type(part), dict):
        part.pop(key, None)
    elif issubclass(type(part), list):
        del part[key : key + 1]
    else:
        delete_attribute(part, key)


def _on_target(code: Alias, target: Tensor) -> Any:
    storage = target.untyped_storage()
    begin = target.data_ptr() - storage.data_ptr() + code.offset
    if code.way == "array":
        if target.device.type != "cpu":
            raise ValueError(f"a NumPy array cannot be a view of a tensor on {target.device}")
        dtype = np.lib.format.descr_to_dtype(code.dtype)
        memory = bytes_in((storage.data_ptr(), storage.data_ptr() + storage.nbytes()), [target])
        array = array_on(memory.numpy(), dtype, code.shape, code.strides, begin)
        array.flags.writeable = code.flag
        return array
    size = code.dtype.itemsize
    reach = sum((n - 1) * step for n, step in zip(code.shape, code.strides, strict=True))
    # torch refuses an offset before the storage, but would enlarge the storage at its end.
    if begin % size or (reach + 1) * size + begin > storage.nbytes():
        raise ValueError(f"it extends beyond the {storage.nbytes()} bytes of the storage")
    twin = tensor_on(storage, code.dtype, code.shape, code.strides, begin // size)
    return twin.requires_grad_(code.flag)

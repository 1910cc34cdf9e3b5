"""Names the objects that an owner reaches: networks, their parts, parameters, optimizers, others.

An object keeps the name that it had after setup, whatever refers to it later. Lists, tuples and
dicts are entered, and so are attributes of objects with a ``state_dict``, which may leave some out.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from helios.core.generators import is_generator
from helios.core.memory import has_plain_bytes, span_of
from helios.core.wrappers import unwrap
from helios.errors import StateError
from helios.protocols import Stateful
from helios.state_graph.attribute_rules import left_out, may_hold_more
from helios.state_graph.network_parts import Networks
from helios.state_graph.values import LEAVES, are_atoms, attributes_of, refer_to

References: TypeAlias = list[tuple[int, Callable[[], Any], str]]
"""Objects by id, each with a reference that shows whether it is still alive, and its name."""

_LISTS = (list, tuple, deque)
_MAX_DEPTH = 100


@final
class Outside:
    """What other owners save.

    Args:
        parts: it, by name.

    Attributes:
        parts: the same.
        names: the names by id.
    """

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        self.parts: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self._extents: list[tuple[int, int, str]] = []
        self._reaches: list[int] = []
        self._num_measured = 0
        self.add(parts or {})

    def add(self, parts: Mapping[str, object]) -> None:
        """Add what a further owner saves; what has a name already keeps it."""
        for name, part in parts.items():
            if id(part) not in self.names:
                self.parts[name] = part
                self.names[id(part)] = name

    def find_overlap(self, begin: int, end: int) -> tuple[int, int, str] | None:
        """Return begin, end and name of the first tensor or array that overlaps some memory."""
        if begin >= end:
            return None
        if self._num_measured < len(self.parts):
            self._measure()
        for number in range(bisect_right(self._reaches, begin), len(self._extents)):
            if self._extents[number][0] >= end:
                break
            if self._extents[number][1] > begin:
                return self._extents[number]
        return None

    def _measure(self) -> None:
        """Sort what was added since by its address, with the highest end up to each."""
        new = itertools.islice(self.parts.items(), self._num_measured, None)
        self._num_measured = len(self.parts)
        for name, part in new:
            is_dense = isinstance(part, Tensor) and not is_lazy(part) and has_plain_bytes(part)
            if is_dense or isinstance(part, np.ndarray):
                begin, end = span_of(part)
                if begin and begin < end:
                    self._extents.append((begin, end, name))
        self._extents.sort()
        self._reaches = [*itertools.accumulate((end for _, end, _ in self._extents), max)]


@dataclass(frozen=True)
class Rules:
    """What a walk leaves out, and what is known from setup.

    Attributes:
        exclude: attributes of the owner that never count.
        unsaved: attributes, and paths below them, that are declared as not to be saved.
        known: names of the objects of setup that are still alive, by id.
        tops: the names of those that attributes of the owner held after setup; ``None`` before.
        outside: what other owners save.
        data_types: the only types that count as attributes of the owner, besides generators;
            empty for all.
    """

    exclude: frozenset[str] = frozenset()
    unsaved: frozenset[str] = frozenset()
    known: Mapping[int, str] = field(default_factory=dict)
    tops: frozenset[str] | None = None
    outside: Outside = field(default_factory=Outside)
    data_types: tuple[type, ...] = ()

    def is_declared(self, path: str) -> bool:
        """Return whether a path, or one above it, is declared as unsaved."""
        if not self.unsaved:
            return False
        ends = [end for end, mark in enumerate(path) if mark == "."]
        return not self.unsaved.isdisjoint([path, *(path[:end] for end in ends)])

    def holders(self) -> frozenset[str]:
        """Return the paths above those that are declared."""
        return frozenset(
            path[:end] for path in self.unsaved for end, mark in enumerate(path) if mark == "."
        )


def has_state(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    # Checking the class takes 1 % of the time, and a class itself has no state.
    return issubclass(type(value), Stateful)


def path_of(parent: str, key: Any) -> str:
    """Return the path of a member, as in messages."""
    return f"{parent}.{key}" if parent else str(key)


def has_odd_keys(table: dict[Any, Any]) -> bool:
    """Return whether some keys of a dict are tensors or networks."""
    return any(isinstance(key, Tensor | nn.Module) for key in table)


def as_written(path: str, objects: Mapping[str, object]) -> str:
    """Return the path of a tensor as users write it, if only an optimizer holds the tensor."""
    owner, *place = path.rsplit(".", 2)
    if len(place) < 2 or not isinstance(objects.get(owner), Optimizer):
        return path
    return f'{owner}.param_groups[{place[0]}]["params"][{place[1]}]'


@final
class ObjectNames:
    """The names of the objects that an owner reaches.

    Args:
        owner: the object whose attributes are searched.
        rules: what is left out.

    Attributes:
        rules: the same.
        objects: objects with a state in attributes, lists, tuples and dicts, by path, each once.
        inner: those that only other objects hold.
        networks: the parts of networks.
        loose: parameters in no network, and tensors that only an optimizer holds, by path.
        leaves: leaf tensors in attributes, by path.
        names: the names of all objects, by id.
        parts: the objects by name.
        shared: objects under further names that lead to them.
        nameless: names of tensors that only an inner optimizer holds.
        tables: the ids of the tables of optimizers, which are saved with these.
        members: the attributes of each object that its state may leave out, by id.
    """

    def __init__(self, owner: object, rules: Rules) -> None:
        self.rules = rules
        self.objects: dict[str, Any] = {}
        self.inner: dict[str, Any] = {}
        self.networks = Networks()
        self.loose: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self.names: dict[int, str] = {id(owner): ""}
        self.parts: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.nameless: set[str] = set()
        self.tables: dict[int, str] = {}
        self.members: dict[int, list[tuple[str, Any]]] = {}
        self.outside_names = rules.outside.names
        self._named: set[str] = set()
        self._done: set[str] = set()
        self._late: deque[tuple[str, Any]] = deque()
        self._searched: set[int] = set()
        self._table = self.objects
        self._search("", members_of(owner, rules))
        self._settle()

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, without those that only other objects hold."""
        return {path: part for path, part in self.objects.items() if isinstance(part, nn.Module)}

    def all_modules(self) -> dict[str, nn.Module]:
        """Return the networks by path, including those that only other objects hold."""
        parts = {**self.objects, **self.inner}
        return {path: part for path, part in parts.items() if isinstance(part, nn.Module)}

    def named(self) -> dict[str, Any]:
        """Return the objects by name, also by those that further ways to them have."""
        return {**self.shared, **self.parts}

    def anew(self) -> ObjectNames:
        """Return the same objects with the parts that their networks have now."""
        twin = copy.copy(self)
        twin.networks = Networks()
        return twin

    def find(self, name: str) -> Any:
        """Return the object with a name, of this owner or of another one, or ``None``."""
        for table in (self.parts, self.shared, self.rules.outside.parts):
            found = table.get(name)
            if found is not None:
                return found
        return None

    def references(self) -> References:
        """Return what can recognize these objects later."""
        found: References = []
        for name, part in self.parts.items():
            if id(part) in self.names:
                inside = unwrap(part)
                each = {id(part): part, id(inside): inside}
                found += ((number, refer_to(one), name) for number, one in each.items())
        return found

    def _search(self, parent: str, members: Iterable[tuple[Any, Any]], depth: int = 0) -> None:
        """Find objects with a state among members, and in the containers among them."""
        unsaved = self.rules.unsaved
        for key, value in members:
            if _is_without_objects(value):
                continue
            path = path_of(parent, key)
            if path in unsaved:
                continue
            if has_state(value):
                self._meet(path, value)
            elif isinstance(value, Tensor):
                if value.is_leaf:
                    self.leaves.setdefault(path, value)
            elif issubclass(type(value), (dict, list, tuple, deque)):  # not what says so of itself
                self._search_container(path, value, depth)

    def _search_container(self, path: str, value: Any, depth: int) -> None:
        if depth == _MAX_DEPTH or id(value) in self._searched or id(value) in self.tables:
            return
        self._searched.add(id(value))
        if not isinstance(value, dict):
            self._search(path, enumerate(value), depth + 1)
        elif has_odd_keys(value):
            # Its keys get names once all objects have one.
            self._late.append((path, value))
        else:
            self._search(path, value.items(), depth + 1)

    def _meet(self, path: str, value: Any) -> None:
        if id(value) in self.outside_names or id(value) in self.names:
            return
        tops, name = self.rules.tops, self.rules.known.get(id(unwrap(value)))
        if tops is None or name in tops:
            self.add_object(path, value, self._table)
        else:
            # It may be part of a network, and has a name once all networks have one.
            self._late.append((path, value))

    def add_object(self, path: str, part: Any, table: dict[str, Any]) -> str:
        """Give an object a name, and return it; a wrapper has that of the module inside."""
        inside = unwrap(part)
        name = self.names.get(id(inside))
        if name is None:
            name = self.name_new(inside, path)
            tops = self.rules.tops
            table = self.objects if tops is not None and name in tops else table
            table[name] = self.parts[name] = part
            if isinstance(part, Optimizer):
                self._add_tables(name, part)
        self.names[id(part)] = name
        return name

    def _add_tables(self, path: str, optimizer: Optimizer) -> None:
        for name in ("param_groups", "state"):
            held = getattr(optimizer, name, None)
            self.tables[id(held)] = f"{path}.{name}"
            self.parts[f"{path}.{name}"] = held

    def name_new(self, part: object, path: str) -> str:
        """Give an object the name that it had after setup, or its path.

        Raises:
            StateError: if keys of a dict that setup makes lead to one path.
        """
        name = self.rules.known.get(id(part), path)
        if name in self.parts and self.rules.tops is None:
            raise StateError(
                f"The path {name!r} refers to two objects with a state_dict: the keys of a dict "
                "must differ as text too. Rename one of the keys."
            )
        # A new object has the path of another one that still exists.
        name = self.names[id(part)] = self.free(name)
        return name

    def free(self, name: str) -> str:
        """Return a name that no other node has."""
        while name in self.parts:
            name += " (new)"
        return name

    def _settle(self) -> None:
        """Name the parts of networks, what only objects hold, and the parameters of optimizers."""
        order = {name: place for place, name in enumerate(self.rules.known.values())}
        # A part of several networks belongs to the first one, which must be as after setup.
        ordered = sorted(self.objects.items(), key=lambda item: order.get(item[0], len(order)))
        self.objects.clear()
        self.objects.update(ordered)
        self._name_networks(self.objects)
        self._keep_parts()
        self._name_late()
        self._name_networks(self.objects)
        self._table = self.inner
        self._search_attributes()
        for path, part in self.objects.items():
            if isinstance(part, Optimizer):
                self._name_members(path, part)
        self.leaves = {
            path: leaf
            for path, leaf in self.leaves.items()
            if self.name_of(id(leaf)) is None or self.names.get(id(leaf)) in self.loose
        }
        for path, leaf in list(self.leaves.items()):
            if isinstance(leaf, nn.Parameter):
                self.name_loose(path, leaf)
        for path, part in self.inner.items():
            if isinstance(part, Optimizer):
                self._name_strangers(path, part)

    def _name_strangers(self, path: str, optimizer: Optimizer) -> None:
        """Name, by position, tensors of an inner optimizer that nothing else holds."""
        for number, group in enumerate(optimizer.param_groups):
            for index, part in enumerate(group["params"]):
                if self.name_of(id(part)) is None:
                    self.nameless.add(self.name_any(part, f"{path}.{number}.{index}"))

    def _name_late(self) -> None:
        while self._late:
            path, part = self._late.popleft()
            if isinstance(part, dict) and not has_state(part):
                self._search(path, [(self.name_key(key), value) for key, value in part.items()])
            elif id(unwrap(part)) not in self.names:
                self.add_object(path, part, self._table)

    def _name_networks(self, objects: Mapping[str, Any]) -> None:
        for path, part in list(objects.items()):
            if isinstance(part, nn.Module) and path not in self._named:
                self.name_parts(path, part)

    def _keep_parts(self) -> None:
        """Keep parts of networks as objects of their own that attributes held after setup."""
        gone = {
            number: name
            for number, name in self.rules.known.items()
            if name in (self.rules.tops or ()) and name not in self.objects
        }
        for path, network in list(self.modules().items()) if gone else ():
            for _, part in self.networks.of(network).modules:
                name = gone.pop(id(part), path)
                if name != path:
                    self.names[id(part)] = name
                    self.objects[name] = self.parts[name] = part
                    self.name_parts(name, part)

    def add_inner(self, path: str, part: Any) -> str:
        """Name an object that only objects without a state lead to, and what it holds."""
        name = self.add_object(path, part, self.inner)
        if isinstance(part, nn.Module):
            self.name_parts(name, part)
        self._search_attributes()
        return name

    def name_any(self, part: object, path: str) -> str:
        """Name an object without a state, and return the name."""
        name = self.names[id(part)] = self.free(self.rules.known.get(id(part), path))
        self.parts[name] = part
        return name

    def name_parts(self, path: str, module: nn.Module) -> None:
        """Name the submodules of a network, and its parameters and persistent buffers."""
        self._named.add(path)
        network, known, names = self.networks.of(module), self.rules.known, self.names
        parts = self.parts
        for place, part in network.modules:
            full = f"{path}.{place}" if place else path
            inside = id(unwrap(part)) if network.has_wrappers else id(part)
            if inside in names:
                names.setdefault(id(part), names[inside])
                self.shared.setdefault(full, part)
            else:
                name = known.get(inside, full)
                name = self.free(name) if name in parts else name
                names[id(part)] = names[inside] = name
                parts[name] = part
        for place, _, _, tensor in network.tensors:
            full = f"{path}.{place}"
            if id(tensor) in names or id(tensor) in self.outside_names:
                self.shared.setdefault(full, tensor)
            else:
                name = known.get(id(tensor), full)
                name = names[id(tensor)] = self.free(name) if name in parts else name
                parts[name] = tensor

    def _search_attributes(self) -> None:
        """Find what only objects hold, in their attributes."""
        done = self._done
        while waiting := [
            (path, part)
            for path, part in (*self.objects.items(), *self.inner.items())
            if path not in done
        ]:
            done.update(path for path, _ in waiting)
            for path, part in waiting:
                for place, held in self._attribute_holders(path, part):
                    if id(held) not in self.members:
                        self.members[id(held)] = members = left_out(held)
                        self._search(place, members)
            self._name_late()
            self._name_networks(self.inner)

    def _attribute_holders(self, path: str, part: Any) -> Iterator[tuple[str, Any]]:
        """Yield an object, or the modules of a network, with the paths of their attributes."""
        if not isinstance(part, nn.Module):
            if not self.rules.is_declared(path):
                yield path, part
            return
        for name, inner in self.networks.of(part).modules:
            place = f"{path}.{name}" if name else path
            if may_hold_more(inner) and not self.rules.is_declared(place):
                yield place, inner

    def _name_members(self, path: str, optimizer: Optimizer) -> None:
        paths = {id(leaf): place for place, leaf in reversed(self.leaves.items())}
        for number, group in enumerate(optimizer.param_groups):
            for index, part in enumerate(group["params"]):
                place = f"{path}.{number}.{index}"
                self.name_loose(paths.get(id(part), place), part, keeps_name=id(part) in paths)

    def name_loose(self, path: str, part: Tensor, *, keeps_name: bool = True) -> None:
        """Name a tensor that training updates and no network holds."""
        if self.name_of(id(part)) is None:
            known = self.rules.known.get(id(part), path) if keeps_name else path
            name = self.names[id(part)] = self.free(known)
            self.loose[name] = self.parts[name] = part

    def name_key(self, key: Any) -> Any:
        """Return what stands for the key of a dict in paths and files."""
        name = self.name_of(id(key)) if isinstance(key, Tensor | nn.Module) else None
        return key if name is None else f"<{name}>"

    def name_of(self, number: int) -> str | None:
        """Return the name of an object of this owner or of another one, by its id."""
        name = self.names.get(number)
        return self.outside_names.get(number) if name is None else name


def members_of(owner: object, rules: Rules) -> list[tuple[str, Any]]:
    """Return the attributes of the owner that count, in the order of their names."""
    attributes = attributes_of(owner)
    members = [(key, attributes[key]) for key in sorted(attributes.keys() - rules.exclude)]
    if not rules.data_types:
        return members
    return [
        (key, value)
        for key, value in members
        if isinstance(value, rules.data_types) or is_generator(value)
    ]


def _is_without_objects(value: Any) -> bool:
    """Return whether a value holds no object at all, as most containers do."""
    kind = type(value)
    if kind in LEAVES:
        return True
    if kind is dict:
        return LEAVES.issuperset(map(type, value.values())) and are_atoms(value)
    return kind in _LISTS and LEAVES.issuperset(map(type, value))

"""Names networks and their parts, optimizers and stateful objects, which only ``setup`` can make.

An anchor has the first path that led to it after setup, and keeps that name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.generators import is_generator
from helios.core.utils import Stateful
from helios.core.wrappers import unwrap
from helios.state.networks import Network, is_internal_class, is_odd_optimizer, left_out
from helios.state.values import ATOMS, LEAVES, refer_to
from helios.storage.plain_objects import attributes_of

References: TypeAlias = list[tuple[int, Callable[[], Any], str]]
"""Anchors by id, each with a reference that shows whether it is still alive, and its name."""

_MAX_DEPTH = 100


_HELD = frozenset((dict, list, Tensor))


@final
class Held:
    """The groups of optimizers, and the tables and tensors of their state.

    Args:
        optimizers: the optimizers, by name.
        name_of: returns the name of a parameter.
    """

    def __init__(
        self, optimizers: Mapping[str, Optimizer], name_of: Callable[[object], str | None]
    ) -> None:
        self._optimizers, self._name_of = optimizers, name_of

    def name_of(self, part: object) -> str | None:
        """Return the name of a part, if it is one."""
        if type(part) not in _HELD or id(part) not in self._ids:
            return None
        return next((name for name, each in self._parts.items() if each is part), None)

    def find(self, name: str) -> Any:
        """Return the part with a name, or ``None``."""
        return self._parts.get(name) if self._optimizers else None

    @cached_property
    def _ids(self) -> set[int]:
        """What may have a name: most values are no part of an optimizer."""
        found: set[int] = set()
        for optimizer in self._optimizers.values():
            for table in (*optimizer.param_groups, *optimizer.state.values()):
                found.add(id(table))
                found.update(map(id, table.values() if isinstance(table, dict) else ()))
        return found

    @cached_property
    def _parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                name = name_of_group(path, [self._name_of(part) for part in group["params"]])
                found[name] = group
                own = {key: each for key, each in group.items() if key != "params"}
                found |= each_named(name, own, itself=False)
            if not is_odd_optimizer(optimizer):
                for key, entry in optimizer.state.items():
                    name = f"<{self._name_of(key)}>" if isinstance(key, Tensor) else key
                    found |= each_named(f"{path}.state.{name}", entry)
        return found


def name_of_group(path: str, parameters: Iterable[str | None]) -> str:
    """Return the name of a group: that of its first parameter, since others may come before it."""
    return f"{path}.param_groups.<{min((name or '' for name in parameters), default='')}>"


def each_named(name: str, value: Any, *, itself: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps for a parameter, and the members of containers, by name."""
    if type(value) in _HELD:
        if itself:
            yield name, value
        if not isinstance(value, Tensor):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                yield from each_named(f"{name}.{key}", each)


@final
class Outside:
    """The objects that other owners save, by name and by id."""

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        self.parts: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.add(parts or {})
        optimizers = {n: part for n, part in self.parts.items() if isinstance(part, Optimizer)}
        # In what optimizers hold, parameters have the names that they have in the model.
        self._held = Held(optimizers, lambda part: self.names.get(id(part), "").partition("/")[2])

    def name_of(self, part: object) -> str | None:
        """Return the name of an object that another owner saves, or ``None``."""
        return self.names.get(id(part)) or self._held.name_of(part)

    def find(self, name: str) -> Any:
        """Return the object that another owner saves under a name, or ``None``."""
        found = self.parts.get(name)
        return self._held.find(name) if found is None else found

    def add(self, parts: Mapping[str, object]) -> None:
        """Add the objects of another owner; existing names are kept."""
        for name, part in parts.items():
            if id(part) not in self.names:
                self.parts[name] = part
                self.names[id(part)] = name


@dataclass(frozen=True)
class Rules:
    """The rules for an owner's attributes, and what is known of them from setup.

    Attributes:
        exclude: attributes of the owner that never count.
        unsaved: attributes and paths that are declared as not to be saved.
        known: names of the anchors of setup that are still alive, by id.
        tops: the paths of those that attributes held after setup; ``None`` during setup.
        outside: what other owners save.
        lost: paths of values that are too large, or of a class that loading does not know.
        data_types: the only types that count, besides generators; empty for all.
        is_strict: whether what was created after setup is an anchor too; otherwise only what has
            taken the place of one.
    """

    exclude: frozenset[str] = frozenset()
    unsaved: frozenset[str] = frozenset()
    known: Mapping[int, str] = field(default_factory=dict)
    tops: frozenset[str] | None = None
    outside: Outside = field(default_factory=Outside)
    data_types: tuple[type, ...] = ()
    lost: frozenset[str] = frozenset()
    is_strict: bool = True

    def is_declared(self, path: str) -> bool:
        """Return whether a path, or one above it, is declared as unsaved."""
        return bool(self.unsaved) and not self.unsaved.isdisjoint((path, *above(path)))

    def members_of(self, owner: object) -> list[tuple[str, Any]]:
        """Return the attributes of the owner that count, in the order of their names."""
        table = attributes_of(owner)
        return [
            (key, table[key])
            for key in sorted(table.keys() - self.exclude)
            if not self.data_types
            or isinstance(table[key], self.data_types)
            or is_generator(table[key])
        ]


def has_state(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    # Checking the class takes 1 % of the time, and a class itself has no state.
    return issubclass(type(value), Stateful)


def path_of(parent: str, key: Any) -> str:
    """Return the path of a member, as in messages."""
    return f"{parent}.{key}" if parent else str(key)


def above(path: str) -> Iterator[str]:
    """Yield the paths above a path."""
    return (path[:end] for end, mark in enumerate(path) if mark in ".[")


def leads_to(path: str, names: Iterable[str]) -> bool:
    """Return whether one of the names is a path, or below it."""
    return any(name == path or name.startswith(f"{path}.") for name in names)


@final
class Anchors:
    """The anchors of an owner.

    Attributes:
        objects: objects with a state in attributes, lists, tuples and dicts, by path, each once.
        inner: those that only other objects hold, which a walk adds.
        names: the names of all anchors, by id.
        parts: the anchors by name; further names of them come in ``shared``.
        loose: parameters in no network, and tensors that only an optimizer holds, by path.
        leaves: leaf tensors in attributes, by path.
    """

    def __init__(self, owner: object, rules: Rules) -> None:
        self.rules = rules
        self.objects: dict[str, Any] = {}
        self.inner: dict[str, Any] = {}
        self.names: dict[int, str] = {id(owner): ""}
        self.parts: dict[str, Any] = {"": owner}
        self.shared: dict[str, Any] = {}
        self.loose: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self._networks: dict[int, Network] = {}
        self._late: deque[tuple[str, Any]] = deque()
        self._searched: set[int] = set()
        self._search("", rules.members_of(owner))
        order = {name: place for place, name in enumerate(rules.known.values())}
        # A part of several networks belongs to the first one, which must be as after setup.
        self.objects = dict(sorted(self.objects.items(), key=lambda i: order.get(i[0], len(order))))
        for path, part in [*self.objects.items()]:
            self.name_parts(path, part)
        # Parts of networks that attributes held after setup are objects of their own.
        for number, name in rules.known.items():
            part = self.parts.get(name)
            if name in (rules.tops or ()) and name not in self.objects and id(part) == number:
                self.objects[name] = part
        while self._late:
            path, part = self._late.popleft()
            if isinstance(part, dict):
                self._search(path, [(self.name_key(key), each) for key, each in part.items()])
            elif id(unwrap(part)) not in self.names and self._admits(path):
                self.add(path, part)
        self._name_loose()
        for path, part in [*self.objects.items()]:
            self._add_inner(path, part)

    def _admits(self, path: str) -> bool:
        """Return whether an object that setup has not put there may be an anchor."""
        tops = self.rules.tops
        return self.rules.is_strict or tops is None or path in tops - self.parts.keys()

    # ---- what was found

    def of_kind(self, kind: Any, *, with_inner: bool = False) -> dict[str, Any]:
        """Return the objects of a class by path."""
        table = {**self.inner, **self.objects} if with_inner else self.objects
        return {path: part for path, part in table.items() if isinstance(part, kind)}

    def network(self, module: nn.Module) -> Network:
        """Return the parts of a network, which is walked on first use."""
        found = self._networks.get(id(module))
        if found is None:
            found = self._networks[id(module)] = Network(module)
        return found

    def forget_networks(self) -> None:
        """Walk networks again, after their parts were moved."""
        self._networks.clear()

    def name_of(self, part: object) -> str | None:
        """Return the name of an anchor of this owner or of another one."""
        name = self.names.get(id(part)) or self.held.name_of(part)
        return self.rules.outside.name_of(part) if name is None else name

    def find(self, name: str) -> Any:
        """Return the anchor with a name, of this owner or of another one, or ``None``."""
        for find in (self.parts.get, self.shared.get, self.held.find, self.rules.outside.find):
            found = find(name)
            if found is not None:
                return found
        return None

    def find_own(self, name: str) -> Any:
        """Return the anchor with a name as its first one, also of another owner, or ``None``."""
        found = self.parts.get(name)
        return self.rules.outside.find(name) if found is None else found

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that an optimizer may update, by each of their names."""
        named = {**self.rules.outside.parts, **self.shared, **self.parts}
        return {name: part for name, part in named.items() if isinstance(part, Tensor)}

    def references(self) -> References:
        """Return references that can recognize these anchors later."""
        found: References = []
        for name, part in self.parts.items():
            if name and id(part) in self.names:
                inside = unwrap(part)
                each = {id(part): part, id(inside): inside}
                found += ((number, refer_to(one), name) for number, one in each.items())
        return found

    def name_key(self, key: Any) -> Any:
        """Return the text of a dict's key in paths."""
        name = self.name_of(key) if isinstance(key, Tensor | nn.Module) else None
        return key if name is None else f"<{name}>"

    # ---- naming

    def add(self, path: str, part: Any, *, is_inner: bool = False, names_parts: bool = True) -> str:
        """Name an object with a state, and its parts; a wrapper has the name of what is inside."""
        inside = unwrap(part)
        name = self.names.get(id(inside))
        if name is None:
            name = self.add_any(path, inside)
            is_top = self.rules.tops is not None and name in self.rules.tops
            (self.inner if is_inner and not is_top else self.objects)[name] = part
            self.parts[name] = part
            if isinstance(part, Optimizer):
                for key in ("param_groups", "state"):
                    table = getattr(part, key, None)
                    self.names[id(table)] = f"{name}.{key}"
                    self.parts[f"{name}.{key}"] = table
            if names_parts:
                self.name_parts(name, part)
            if is_inner and isinstance(part, Optimizer):
                self.name_updated(name, part)
                self.__dict__.pop("held", None)
        self.names[id(part)] = name
        return name

    def add_any(self, path: str, part: Any) -> str:
        """Name an anchor: as after setup, or by its path, which no other anchor has."""
        name = self.rules.known.get(id(part), path)
        while name in self.parts:
            name += " (old)" if id(part) in self.rules.known else " (new)"
        self.names[id(part)], self.parts[name] = name, part
        return name

    def name_parts(self, path: str, module: Any) -> None:
        """Name the submodules of a network, and its parameters and persistent buffers."""
        if not isinstance(module, nn.Module):
            return
        network = self.network(module)
        for place, part in network.modules:
            full, inside = path_of(path, place) if place else path, unwrap(part)
            if id(inside) in self.names:
                self.names.setdefault(id(part), self.names[id(inside)])
                self.shared.setdefault(full, part)
            else:
                self.names[id(part)] = self.add_any(full, inside)
        outside = self.rules.outside.names
        for place, _, _, tensor in network.tensors:
            full = f"{path}.{place}"
            if id(tensor) in self.names or id(tensor) in outside:
                self.shared.setdefault(full, tensor)
            else:
                self.add_any(full, tensor)

    def _search(self, parent: str, members: Iterable[tuple[Any, Any]], depth: int = 0) -> None:
        """Find objects with a state among members, and in the containers among them."""
        for key, value in members:
            if _is_without_objects(value):
                continue
            path = path_of(parent, key)
            if path in self.rules.unsaved:
                continue
            if has_state(value):
                self._meet(path, value)
            elif isinstance(value, Tensor):
                if value.is_leaf:
                    self.leaves.setdefault(path, value)
            elif issubclass(type(value), dict | list | tuple | deque) and depth < _MAX_DEPTH:
                self._search_container(path, value, depth + 1)

    def _search_container(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._searched or id(value) in self.names:
            return
        self._searched.add(id(value))
        if not isinstance(value, dict):
            self._search(path, enumerate(value), depth)
        elif any(isinstance(key, Tensor | nn.Module) for key in value):
            # Its keys get names once all networks have one.
            self._late.append((path, value))
        else:
            self._search(path, value.items(), depth)

    def _meet(self, path: str, value: Any) -> None:
        if id(value) in self.rules.outside.names or id(value) in self.names:
            return
        tops = self.rules.tops
        if tops is None or self.rules.known.get(id(unwrap(value))) in tops:
            self.add(path, value, names_parts=False)
        else:
            # It may be part of a network, and has a name once all networks have one.
            self._late.append((path, value))

    def _add_inner(self, path: str, part: Any) -> None:
        """Name the objects that only this one holds, before values refer to what they hold."""
        if isinstance(part, nn.Module) or self.rules.is_declared(path):
            return
        for place, value in left_out(part):
            for key, each in _with_state(path_of(path, place), value):
                is_of_setup = self.rules.tops is None or id(each) in self.rules.known
                if is_of_setup and self.name_of(each) is None and not is_internal_class(type(each)):
                    self._add_inner(self.add(key, each, is_inner=True), each)

    @cached_property
    def held(self) -> Held:
        """The content of optimizers: their groups, and tables and tensors of their state."""
        optimizers = self.of_kind(Optimizer, with_inner=True)
        outside = self.rules.outside.names
        return Held(optimizers, lambda part: self.names.get(id(part)) or outside.get(id(part)))

    def _name_loose(self) -> None:
        """Name the parameters that no network holds."""
        paths = {id(leaf): path for path, leaf in reversed(self.leaves.items())}
        for path, optimizer in self.of_kind(Optimizer).items():
            self.name_updated(path, optimizer, paths)
        for path, leaf in self.leaves.items():
            is_free = isinstance(leaf, nn.Parameter) and self.name_of(leaf) is None
            if is_free and self._admits(path):
                self.loose[self.add_any(path, leaf)] = leaf
        self.leaves = {
            path: leaf
            for path, leaf in self.leaves.items()
            if self.name_of(leaf) is None or self.names.get(id(leaf)) in self.loose
        }

    def name_updated(
        self, path: str, optimizer: Optimizer, paths: Mapping[int, str] | None = None
    ) -> None:
        """Name, by position if by nothing else, the tensors that an optimizer updates."""
        for number, group in enumerate(optimizer.param_groups):
            for index, part in enumerate(group["params"]):
                if self.name_of(part) is None:
                    place = f'{path}.param_groups[{number}]["params"][{index}]'
                    place = (paths or {}).get(id(part), place)
                    self.loose[self.add_any(place, part)] = part


def _with_state(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or the members of a container, that have a state."""
    if has_state(value):
        yield path, value
    elif isinstance(value, dict | list | tuple) and not _is_without_objects(value):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{path}.{key}", each) for key, each in pairs if has_state(each))


def _is_without_objects(value: Any) -> bool:
    """Return whether a value holds no object at all, as most containers do."""
    kind = type(value)
    if kind is dict:
        return LEAVES.issuperset(map(type, value.values())) and ATOMS.issuperset(map(type, value))
    return kind in LEAVES or (kind in (list, tuple) and LEAVES.issuperset(map(type, value)))

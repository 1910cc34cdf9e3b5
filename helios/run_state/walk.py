"""Walks over everything that an owner reaches: objects with state, and the slots of other values.

Lists, tuples and dicts are entered. One without any object in it is kept whole, so that aliases
within it are preserved. Attributes of objects with a ``state_dict`` are entered too, because the
``state_dict`` may leave some out. Other objects are not entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import FunctionType
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import is_generator
from helios.core.wrappers import unwrap
from helios.errors import StateError
from helios.protocols import Stateful
from helios.run_state.attribute_rules import is_of_the_house, left_out, may_hold_more
from helios.run_state.object_names import KeyedByObjects, Names, has_odd_keys
from helios.run_state.plain_values import ATOMS, is_flat
from helios.run_state.walk_result import Rules, Slot, WalkResult, keyed_members


def is_declared(path: str, unsaved: frozenset[str]) -> bool:
    """Return whether a path, or one above it, is declared as not to be saved."""
    if not unsaved:
        return False
    path = path.rstrip("/")
    ends = [end for end, mark in enumerate(path) if mark == "."]
    return not unsaved.isdisjoint([path, *(path[:end] for end in ends)])


def walk(owner: object, rules: Rules) -> WalkResult:
    """Walk over the attributes of an owner, in the order of their names.

    Objects in attributes, lists, tuples and dicts come first; the attributes of objects are added
    by :func:`enter_objects`.

    Raises:
        StateError: if two objects have the same path (dict keys ``1`` and ``"1"``).
    """
    return _walk(owner, rules).found


def walk_all(
    owner: object, rules: Rules, settled: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[WalkResult, Names]:
    """Walk over the attributes of an owner and of the objects that they hold.

    Args:
        owner: the object whose ``__dict__`` is walked.
        rules: what is left out.
        settled: immutable members of modules, by parent and key. A module that still holds the same
            object there is not compared, which keeps large networks cheap.

    Returns:
        What was found, and the names of all objects.
    """
    walker = _walk(owner, rules)
    names = Names(walker.found.objects, walker.name_outside, lambda name: rules.outside().get(name))
    walker.enter_objects(names, settled or {})
    return walker.found, names


def _walk(owner: object, rules: Rules) -> _Walker:
    walker = _Walker(owner, rules)
    attributes = vars(owner)
    names = sorted(attributes.keys() - rules.exclude)
    walker.found.containers[""] = attributes
    walker.enter("", [(name, attributes[name]) for name in names])
    walker.keep_parts(rules.earlier)
    walker.add_unknown()
    walker.settle()
    return walker


def settled_in(found: WalkResult) -> dict[str, dict[str, Any]]:
    """Return the members of modules that can only change by being replaced."""
    settled: dict[str, dict[str, Any]] = {}
    for slot in found.slots.values():
        kind = type(slot.value)
        if slot.parent.endswith("/") and (kind in ATOMS or (kind is tuple and is_flat(slot.value))):
            settled.setdefault(slot.parent, {})[slot.key] = slot.value
    return settled


@final
class _Walker:
    def __init__(self, owner: object, rules: Rules) -> None:
        self.found = WalkResult()
        self._slots: list[Slot] = []
        self._rules = rules
        self._prefixes = {
            path[:end] for path in rules.unsaved for end, mark in enumerate(path) if mark == "."
        }
        self._paths: dict[int, str] = {id(owner): ""}
        self._entered: set[int] = set()
        self._objects = self.found.objects
        self._late: list[Slot] = []
        self._unknown: list[Slot] = []

    def settle(self) -> None:
        """Add the slots that were visited."""
        self.found.slots |= {(slot.parent, slot.key): slot for slot in self._slots}
        self._slots = []

    def enter(
        self, parent: str, members: Iterable[tuple[Any, Any]], *, is_settable: bool = True
    ) -> bool:
        """Visit the members of a container; return whether any must be compared by itself."""
        prefix = f"{parent.rstrip('/')}." if parent else ""
        is_mixed = parent in self._prefixes
        for key, value in members:
            is_mixed |= self._visit(Slot(parent, key, f"{prefix}{key}", value, is_settable))
        return is_mixed

    def _visit(self, slot: Slot) -> bool:
        """Classify the value of a slot; return whether it must be compared by itself."""
        if slot.path in self._rules.unsaved:
            return True
        value = slot.value
        if type(value) not in ATOMS:
            if isinstance(value, list | tuple | dict) and not has_state(value):
                if id(value) not in self._entered:
                    return self._visit_container(slot)
            elif self._visit_object(slot):
                return True
        self._slots.append(slot)
        return False

    def _visit_object(self, slot: Slot) -> bool:
        """Classify an object; return whether it has a name or a state, or is part of Helios."""
        is_stateful = has_state(slot.value)
        is_known = is_stateful or is_of_the_house(slot.value)
        if is_known and (name := self.name_outside(slot.value)) is not None:
            self._name(slot, name)
        elif is_stateful:
            self._add(slot, self._objects)
        elif is_generator(slot.value):
            self._add(slot, self.found.generators)
        else:
            return is_known
        return True

    @cached_property
    def _outside(self) -> dict[int, str]:
        return {id(part): name for name, part in self._rules.outside().items()}

    def name_outside(self, value: object) -> str | None:
        """Return the name of an object that another owner saves."""
        return self._outside.get(id(value))

    def _visit_container(self, slot: Slot) -> bool:
        value = slot.value
        if isinstance(value, dict) and has_odd_keys(value):
            # Its keys get names once all objects have one.
            self._late.append(slot)
            return True
        begin = len(self._slots)
        if slot.path in self._prefixes or not is_flat(value):
            self._entered.add(id(value))
            is_settable = not isinstance(value, tuple)
            is_mixed = self.enter(slot.path, keyed_members(value), is_settable=is_settable)
            self._entered.discard(id(value))
            if is_mixed:
                self._note_container(slot.path, value)
                return True
        self._slots[begin:] = [slot]
        return False

    def _note_container(self, path: str, value: Any) -> None:
        if not isinstance(value, tuple):
            self.found.containers[path] = value
        if isinstance(value, dict):
            self.found.orders[path] = list(value)

    def _add(self, slot: Slot, table: dict[str, Any]) -> None:
        """Give an object or a generator a path, and record that the slot refers to it."""
        identity = id(unwrap(slot.value))
        known = self._rules.known
        is_known = not known or identity in known or self._paths.get(identity) is not None
        if is_known or table is not self.found.objects:
            self._place(slot, table)
        else:
            # It may be part of a network, and has a name once all networks have one.
            self._unknown.append(slot)

    def _place(self, slot: Slot, table: dict[str, Any]) -> None:
        # A wrapped module and its inner module have the same state: the first path counts.
        identity = id(unwrap(slot.value))
        path = self._paths.get(identity)
        if path is None:
            path = self._rules.known.get(identity, slot.path)
            if path in table:
                path = self._free_path(slot, table)
            self._paths[identity] = path
            table[path] = slot.value
        if path:
            self._name(slot, path)

    def add_unknown(self) -> None:
        """Add objects that setup had no slot for, and that are not part of an object it had."""
        names = self._names_of_parts() if self._unknown else {}
        for slot in self._unknown:
            identity = id(unwrap(slot.value))
            if identity in names:
                self._paths[identity] = names[identity]
            self._place(slot, self._objects)

    def _names_of_parts(self) -> Mapping[int, str]:
        return Names(dict(self._objects), self.name_outside, lambda name: None).ids()

    def _free_path(self, slot: Slot, table: dict[str, Any]) -> str:
        if self._rules.known:
            # A new object has the path of another one that still exists.
            return f"{slot.path} (new)"
        raise StateError(
            f"The path {slot.path!r} refers to two objects with a state_dict: the keys of a dict "
            "must differ as text too. Rename one of the keys."
        )

    def _name(self, slot: Slot, path: str) -> None:
        self.found.aliases[slot.parent, slot.key] = path

    def keep_parts(self, earlier: Mapping[str, object]) -> None:
        """Keep the paths of parts of networks that no attribute refers to any more, and the order.

        They have a state under their path, and still exist as parts.
        """
        objects = self.found.objects
        gone = {
            path: part
            for path, part in earlier.items()
            if isinstance(part, nn.Module) and path not in objects
        }
        names = self._names_of_parts() if gone else {}
        for path, part in gone.items():
            if id(part) in names:
                objects[path] = part
                self._paths[id(part)] = path
        # A part of several networks is compared in the first one, which must be as after setup.
        ordered = {path: objects[path] for path in earlier if path in objects} | objects
        objects.clear()
        objects.update(ordered)

    def enter_objects(self, names: Names, settled: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the attributes of objects, and the members of dicts that have objects as keys."""
        self._objects = self.found.inner
        self._paths = _ByName(names.ids, self._paths)
        self._enter_late(names)
        waiting = list(self.found.objects.items())
        seen: set[int] = set()
        while waiting:
            for path, part in waiting:
                if isinstance(part, nn.Module):
                    self._enter_module(path, part, settled, seen)
                elif not is_declared(path, self._rules.unsaved):
                    self._enter_object(path, part)
            self._enter_late(names)
            waiting = [item for item in self.found.inner.items() if id(item[1]) not in seen]
            seen.update(id(part) for _, part in waiting)
        self.settle()

    def _enter_late(self, names: Names) -> None:
        tables = self._optimizer_states() if self._late else set()
        while self._late:
            slot = self._late.pop(0)
            keyed = KeyedByObjects(slot.value, names)
            if id(slot.value) not in self._entered | tables:
                self._entered.add(id(slot.value))
                self.found.containers[slot.path] = keyed
                self.found.orders[slot.path] = list(keyed)
                self.enter(slot.path, keyed.entries())
                self._entered.discard(id(slot.value))

    def _optimizer_states(self) -> set[int]:
        # Saved with the optimizer, whatever else refers to it.
        parts = (*self.found.objects.values(), *self.found.inner.values())
        return {id(part.state) for part in parts if isinstance(part, Optimizer)}

    def _enter_object(self, path: str, part: Stateful) -> None:
        parent = f"{path}/"
        table = vars(part) if _has_attributes(part) else {}
        self.found.containers[parent] = table
        self.enter(parent, left_out(part))
        if isinstance(part, LRScheduler):
            self._enter_functions(path, part)

    def _enter_functions(self, path: str, scheduler: LRScheduler) -> None:
        """Add the attributes of functions, which a scheduler's state_dict leaves out."""
        functions = getattr(scheduler, "lr_lambdas", ())
        for number, function in enumerate(functions):
            if isinstance(function, FunctionType):
                parent = f"{path}.lr_lambdas.{number}/"
                self.found.containers[parent] = vars(function)
                self.enter(parent, sorted(vars(function).items()))

    def _enter_module(
        self,
        path: str,
        module: nn.Module,
        settled: Mapping[str, Mapping[str, Any]],
        seen: set[int],
    ) -> None:
        for name, part in self.found.networks.of(module).modules:
            place = f"{path}.{name}" if name else path
            if id(part) in seen or is_declared(place, self._rules.unsaved):
                continue
            if isinstance(part, nn.ModuleDict):
                self.found.orders[f"{place}/"] = list(part)
            if not may_hold_more(part):
                continue
            seen.add(id(part))
            parent = f"{place}/"
            self.found.containers[parent] = part
            known = settled.get(parent, {})
            members = [
                (key, value)
                for key, value in left_out(part)
                if key not in known or known[key] is not value
            ]
            if members:
                self.enter(parent, members)


class _ByName(dict[int, str]):
    """Paths of objects by id, including parts of networks, which are computed on demand."""

    def __init__(self, names: Callable[[], Mapping[int, str]], paths: dict[int, str]) -> None:
        super().__init__(paths)
        self._names = names

    def get(self, key: int, default: Any = None) -> Any:
        path = super().get(key)
        return path if path is not None else self._names().get(key, default)


def has_state(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    # Checking the class takes 1 % of the time, and a class itself has no state.
    return issubclass(type(value), Stateful)


def _has_attributes(value: object) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict)

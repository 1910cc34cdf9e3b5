"""One pass over an owner's attributes: objects with state, and the places that hold all the rest.

Lists, tuples and dicts are entered; a container without any object in it stays whole, so that its
inner aliases do. Objects are not entered; of modules, what ``state_dict`` leaves out is found by
:func:`enter_modules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from helios.core import wrappers
from helios.core.wrappers import BareNames
from helios.errors import StateError
from helios.protocols import Stateful
from helios.run_state.values import ATOMS

Container: TypeAlias = dict[Any, Any] | list[Any] | nn.Module
SlotKey: TypeAlias = tuple[str, Any]

_OF_TORCH = frozenset(vars(nn.Module())) | {
    *("_compiled_call_impl", "_flat_weights", "_flat_weight_refs"),
    *("_load_hook", "_initialize_hook"),
}
"""Attributes of modules that torch itself looks after: of all, of recurrent and of lazy ones."""

_WRAPPERS = ("torch._dynamo", "torch.fx", "torch.jit", "torch.nn.parallel", "torch.distributed")
"""Where torch defines modules around modules, whose own attributes are machinery."""


@dataclass(frozen=True)
class Slot:
    """A place that holds something without a state of its own.

    Attributes:
        parent: path of the container that it lies in; empty for an attribute of the owner. That
            of a module ends with a slash.
        key: attribute name, key or index in that container.
        path: where it lies, as messages say it, e.g. ``stuff.count``.
        value: what it holds.
        is_settable: whether the container is mutable.
    """

    parent: str
    key: Any
    path: str
    value: Any
    is_settable: bool


@dataclass
class Found:
    """What one pass has found.

    Attributes:
        objects: objects with state by path, each once.
        slots: all other places, by parent and key.
        containers: the mutable containers and modules that slots lie in, by path; the owner's own
            attributes under the empty path.
    """

    objects: dict[str, Stateful] = field(default_factory=dict)
    slots: dict[SlotKey, Slot] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules by path."""
        return {path: part for path, part in self.objects.items() if isinstance(part, nn.Module)}

    def leaves(self) -> dict[str, Tensor]:
        """Return the leaf tensors by path, those inside of plain containers too."""
        leaves: dict[str, Tensor] = {}
        for slot in self.slots.values():
            _collect_leaves(slot.path, slot.value, leaves, set())
        return leaves


def unwrap(value: object) -> object:
    """Return the module inside a compiled or parallel one; anything else as it is."""
    return wrappers.unwrap(value) if isinstance(value, nn.Module) else value


def is_declared(path: str, unsaved: frozenset[str]) -> bool:
    """Return whether a path, or one that it lies below, is declared as not to be saved."""
    if not unsaved:
        return False
    path = path.rstrip("/")
    ends = [end for end, mark in enumerate(path) if mark == "."]
    return not unsaved.isdisjoint([path, *(path[:end] for end in ends)])


def walk(owner: object, exclude: frozenset[str], unsaved: frozenset[str]) -> Found:
    """Look through the attributes of an owner, in the order of their names.

    Args:
        owner: the object whose ``__dict__`` is looked through.
        exclude: attributes that never count.
        unsaved: attributes, and paths below them, that are declared as not to be saved.

    Raises:
        StateError: if two objects have the same path (dict keys ``1`` and ``"1"``).
    """
    walker = _Walker(owner, unsaved)
    attributes = vars(owner)
    walker.enter("", [(name, attributes[name]) for name in sorted(attributes.keys() - exclude)])
    found = walker.found
    found.containers[""] = attributes
    found.slots = {(slot.parent, slot.key): slot for slot in walker.slots}
    return found


def enter_modules(
    found: Found, settled: Mapping[str, Mapping[str, Any]], unsaved: frozenset[str]
) -> None:
    """Add what ``state_dict`` leaves out of modules: plain attributes, non-persistent buffers.

    Args:
        found: what :func:`walk` returned.
        settled: immutable members of modules, by parent and key; where a module still holds the
            very same object there is nothing to look at, which keeps large networks cheap.
        unsaved: as in :func:`walk`.
    """
    seen: set[int] = set()
    for path, module in found.modules().items():
        names = BareNames(module)
        for name, part in module.named_modules():
            place = f"{path}.{names.of(name)}" if names.of(name) else path
            if id(part) in seen or not _tells_too_little(part) or is_declared(place, unsaved):
                continue
            seen.add(id(part))
            parent = f"{place}/"
            found.containers[parent] = part
            known = settled.get(parent, {})
            for key, value in _left_out(part):
                is_settled = key in known and known[key] is value
                if not is_settled and f"{place}.{key}" not in unsaved:
                    slot = Slot(parent, key, f"{place}.{key}", value, is_settable=True)
                    found.slots[parent, key] = slot


def settled_in(found: Found) -> dict[str, dict[str, Any]]:
    """Return the members of modules that can change by being replaced only."""
    settled: dict[str, dict[str, Any]] = {}
    for slot in found.slots.values():
        kind = type(slot.value)
        if slot.parent.endswith("/") and (
            kind in ATOMS or (kind is tuple and _is_flat(slot.value))
        ):
            settled.setdefault(slot.parent, {})[slot.key] = slot.value
    return settled


def _tells_too_little(module: nn.Module) -> bool:
    # One that writes an extra state says itself what belongs to it.
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    return not has_extra and not type(module).__module__.startswith(_WRAPPERS)


def _left_out(module: nn.Module) -> list[tuple[str, Any]]:
    table = vars(module)
    parameters, buffers = table["_parameters"], table["_buffers"]
    hidden = table["_non_persistent_buffers_set"] & buffers.keys()
    return [
        *((key, buffers[key]) for key in sorted(hidden)),
        *(
            (key, table[key])
            for key in sorted(table.keys() - _OF_TORCH)
            # Pruning and the older norms compute such a weight from what is saved.
            if f"{key}_orig" not in parameters and f"{key}_v" not in parameters
        ),
    ]


@final
class _Walker:
    def __init__(self, owner: object, unsaved: frozenset[str]) -> None:
        self.found = Found()
        self.slots: list[Slot] = []
        self._unsaved = unsaved
        self._prefixes = {
            path[:end] for path in unsaved for end, mark in enumerate(path) if mark == "."
        }
        self._seen = {id(owner)}
        self._entered: set[int] = set()

    def enter(
        self, parent: str, members: Iterable[tuple[Any, Any]], *, is_settable: bool = True
    ) -> bool:
        """Visit the members of a container; return whether any must be looked at by itself."""
        prefix = f"{parent}." if parent else ""
        is_mixed = parent in self._prefixes
        for key, value in members:
            slot = Slot(parent, key, f"{prefix}{key}", value, is_settable)
            is_mixed |= self._visit(slot)
        return is_mixed

    def _visit(self, slot: Slot) -> bool:
        if slot.path in self._unsaved:
            return True
        if type(slot.value) not in ATOMS:
            if _has_state(slot.value):
                self._add_object(slot.path, slot.value)
                return True
            if isinstance(slot.value, list | tuple | dict) and id(slot.value) not in self._entered:
                return self._visit_container(slot)
        self.slots.append(slot)
        return False

    def _visit_container(self, slot: Slot) -> bool:
        value = slot.value
        begin = len(self.slots)
        if slot.path in self._prefixes or not _is_flat(value):
            self._entered.add(id(value))
            is_settable = not isinstance(value, tuple)
            is_mixed = self.enter(slot.path, _members(value), is_settable=is_settable)
            self._entered.discard(id(value))
            if is_mixed:
                if is_settable:
                    self.found.containers[slot.path] = value
                return True
        self.slots[begin:] = [slot]
        return False

    def _add_object(self, path: str, value: Stateful) -> None:
        # A wrapped module and the one inside hold the same state: the first path counts.
        identity = id(unwrap(value))
        if identity in self._seen:
            return
        if path in self.found.objects:
            raise StateError(
                f"The path {path!r} names two objects with a state_dict: the keys of a dict must "
                "differ as text too. Rename one of the keys."
            )
        self._seen.add(identity)
        self.found.objects[path] = value


def _has_state(value: object) -> bool:
    # Asking the class costs a hundredth of asking the object, and a class itself has no state.
    return issubclass(type(value), Stateful)


def _members(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _is_flat(value: Any) -> bool:
    return ATOMS.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def _collect_leaves(path: str, value: Any, leaves: dict[str, Tensor], entered: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.is_leaf:
            leaves[path] = value
    elif isinstance(value, list | tuple | dict) and id(value) not in entered:
        for key, member in () if _is_flat(value) else _members(value):
            _collect_leaves(f"{path}.{key}", member, leaves, entered | {id(value)})

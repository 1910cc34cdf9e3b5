"""One pass over an owner's attributes: objects with state, and the places that hold all the rest.

Lists, tuples and dicts are entered; a container without any object in it stays whole, so that its
inner aliases do. Modules and other objects are not entered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from helios.errors import StateError
from helios.model.values import ATOMS
from helios.protocols import Stateful

Container: TypeAlias = dict[Any, Any] | list[Any]
SlotKey: TypeAlias = tuple[str, Any]

COMPILED = "_orig_mod"
"""Where ``torch.compile`` keeps the module that it wraps; part of every name inside."""


@dataclass(frozen=True)
class Slot:
    """A place that holds something without a state of its own.

    Attributes:
        parent: path of the container that it lies in; empty for an attribute of the owner.
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
        containers: the mutable containers that slots lie in, by path; the owner's own attributes
            under the empty path.
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
    """Return the module inside a compiled one; anything else as it is."""
    while isinstance(value, nn.Module) and (inner := dict(value.named_children()).get(COMPILED)):
        value = inner
    return value


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
        # A compiled module and the one that it wraps hold the same state: the first path counts.
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

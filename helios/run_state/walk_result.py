"""What a walk over an owner's attributes finds, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from helios.core.generators import Generator
from helios.protocols import Stateful
from helios.run_state.network_parts import Networks
from helios.run_state.object_names import KeyedByObjects
from helios.run_state.plain_values import is_flat

Container: TypeAlias = dict[Any, Any] | list[Any] | nn.Module | KeyedByObjects
SlotKey: TypeAlias = tuple[str, Any]


@dataclass(frozen=True)
class Slot:
    """An attribute, key or index with a value that has no state of its own.

    Attributes:
        parent: path of its container; empty for an attribute of the owner. The path of an object
            ends with a slash.
        key: attribute name, key or index in that container.
        path: the path in messages, e.g. ``stuff.count``.
        value: the value.
        is_settable: whether the container is mutable.
    """

    parent: str
    key: Any
    path: str
    value: Any
    is_settable: bool


@dataclass
class WalkResult:
    """The result of a walk.

    Attributes:
        objects: objects with state by path, each once.
        inner: objects with state that only other objects hold, by path, each once.
        generators: random number generators by path, each once.
        slots: all other values, by parent and key.
        containers: the mutable containers and objects of the slots, by path; the owner's own
            attributes under the empty path.
        aliases: the object or generator that an attribute or key refers to, by parent and key.
        orders: the keys of dicts that hold objects, and of ``ModuleDict``, by path.
        networks: the parts of networks.
    """

    objects: dict[str, Stateful] = field(default_factory=dict)
    inner: dict[str, Stateful] = field(default_factory=dict)
    generators: dict[str, Generator] = field(default_factory=dict)
    slots: dict[SlotKey, Slot] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    aliases: dict[SlotKey, str] = field(default_factory=dict)
    orders: dict[str, list[Any]] = field(default_factory=dict)
    networks: Networks = field(default_factory=Networks)

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules by path."""
        return {path: part for path, part in self.objects.items() if isinstance(part, nn.Module)}

    def all_modules(self) -> dict[str, nn.Module]:
        """Return the modules by path, including those that only other objects hold."""
        parts = {**self.objects, **self.inner}
        return {path: part for path, part in parts.items() if isinstance(part, nn.Module)}

    def anew(self) -> WalkResult:
        """Return the same objects with the parts that their networks have now."""
        return replace(self, networks=Networks())

    def leaves(self) -> dict[str, Tensor]:
        """Return the leaf tensors by path, including those in plain containers."""
        leaves: dict[str, Tensor] = {}
        for slot in self.slots.values():
            _collect_leaves(slot.path, slot.value, leaves, set())
        return leaves


@dataclass(frozen=True)
class Rules:
    """What a walk leaves out, and the paths that are already known.

    Attributes:
        exclude: attributes of the owner that never count.
        unsaved: attributes, and paths below them, that are declared as ``unsaved``.
        known: the earlier paths of objects, so that an object keeps its path when another attribute
            refers to it too.
        outside: returns the objects that other owners save, by name.
        earlier: the objects of setup that are still alive, by path.
    """

    exclude: frozenset[str] = frozenset()
    unsaved: frozenset[str] = frozenset()
    known: Mapping[int, str] = field(default_factory=dict)
    outside: Callable[[], Mapping[str, object]] = dict
    earlier: Mapping[str, object] = field(default_factory=dict)


def keyed_members(value: Any) -> list[tuple[Any, Any]]:
    """Return the members of a list, tuple or dict with their keys."""
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def path_of(parent: str, key: Any) -> str:
    """Return the path of a member of a container, as in messages."""
    return f"{parent.rstrip('/')}.{key}" if parent else str(key)


def _collect_leaves(path: str, value: Any, leaves: dict[str, Tensor], entered: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.is_leaf:
            leaves[path] = value
    elif isinstance(value, list | tuple | dict) and id(value) not in entered:
        for key, member in () if is_flat(value) else keyed_members(value):
            _collect_leaves(f"{path}.{key}", member, leaves, entered | {id(value)})

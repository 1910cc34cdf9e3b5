"""Determines what an object's own ``state_dict`` holds, to find what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn

from helios.core.memory import storage_of
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.values import ATOMS

EXTRA = "_extra_state"
"""The key of a module's extra state in torch."""


@final
class Coverage:
    """The content of a state: the identical objects in it, and copies under the same key.

    Args:
        state: what ``state_dict`` returned.
        mark: returns marks that are equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._whole = state
        self._state = state if isinstance(state, dict) else {}
        self._mark = mark

    @cached_property
    def _parts(self) -> dict[int, Any]:
        return dict(parts_of(self._whole))

    @cached_property
    def _storages(self) -> set[int]:
        tensors = [part for part in self._parts.values() if isinstance(part, Tensor)]
        return set(map(storage_of, tensors)) - {0}

    def has(self, key: Any, value: Any) -> bool:
        """Return whether the state holds the value itself: under its key, or anywhere else."""
        if type(value) in ATOMS:
            return key in self._state and self._state[key] is value
        if isinstance(value, Tensor) and storage_of(value) in self._storages:
            return True
        return id(value) in self._parts

    def has_copy(self, key: Any, value: Any) -> bool:
        """Return whether the state holds an equal value under the same key.

        An equal value under another key may be a coincidence.
        """
        names = {key, key.lstrip("_")} if isinstance(key, str) else {key}
        known = [self._state[name] for name in names if name in self._state]
        return any(self._mark(part) == self._mark(value) for part in known)

    def has_state(self, key: str, state: Any) -> bool:
        """Return whether the state of an attribute's object is part of this one."""
        tensors = [part for _, part in parts_of(state) if isinstance(part, Tensor)]
        if tensors and {storage_of(part) for part in tensors} <= self._storages:
            return True
        return self.has_copy(key, state)


@final
class Coverages:
    """The content of the ``state_dict`` of each object that was found.

    Args:
        found: the objects.
        states: what objects returned, by path.
        own: what the owner's own ``state_dict`` returned; ``None`` for an owner without one.
        mark: returns marks that are equal for equal values.

    Attributes:
        of: the content of each, by the path of the object or module.
    """

    def __init__(
        self,
        found: ObjectNames,
        states: Mapping[str, dict[str, Any]],
        own: dict[str, Any] | None,
        mark: Callable[[Any], bytes],
    ) -> None:
        self._mark = mark
        parts = {**found.objects, **found.inner}
        self.of = {
            path: Coverage(state, mark)
            for path, state in states.items()
            if not isinstance(parts[path], nn.Module)
        }
        for path, state in states.items():
            if isinstance(parts[path], nn.Module):
                self.of |= _extra_states(path, state, mark)
        if own is not None:
            self.of[""] = Coverage(own, mark)

    def without(
        self, states: Mapping[str, dict[str, Any]], before: Mapping[str, bytes]
    ) -> dict[str, dict[str, Any]]:
        """Return the states that training has changed and that no other state contains.

        Args:
            states: by path.
            before: marks of the states after setup.
        """
        return {
            path: state
            for path, state in states.items()
            if not self.has(path, state) and self._mark(state) != before.get(path)
        }

    def has(self, path: str, state: dict[str, Any]) -> bool:
        """Return whether the state of another object contains that of an object."""
        holders = [path[:end] for end, mark in enumerate(path) if mark == "."]
        return any(
            self.of[holder].has_state(path[len(holder) :].lstrip("."), state)
            for holder in ("", *holders)
            if holder in self.of
        )


def _extra_states(
    path: str, state: Mapping[str, Any], mark: Callable[[Any], bytes]
) -> dict[str, Coverage]:
    """Return the extra states of a network's modules, by the path of their attributes."""
    names = [name for name in state if name.endswith(EXTRA)]
    return {
        f"{path}.{name.removesuffix(EXTRA)}".rstrip("."): Coverage(state[name], mark)
        for name in names
    }


def parts_of(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield every object in a state, with its id first."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen[id(part)] = part
        yield id(part), part
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple) and not ATOMS.issuperset(map(type, part)):
            waiting += part

"""What an object's own ``state_dict`` holds, to find what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, final

import numpy as np
from torch import Tensor

from helios.run_state.values import ATOMS, storage_of

_DEPTH = 3


@final
class Coverage:
    """The content of a state: the very objects in it, and on request equal ones.

    Args:
        state: what ``state_dict`` returned.
        mark: returns what is equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._state = state if isinstance(state, dict) else {}
        self._mark = mark
        self._parts = dict(_parts_of(state, {}))
        self._storages = {
            storage_of(part) for part in self._parts.values() if isinstance(part, Tensor)
        } - {0}

    def has(self, key: Any, value: Any) -> bool:
        """Return whether the state holds a value itself: under its own key, or anywhere in it."""
        if type(value) in ATOMS:
            return key in self._state and self._state[key] is value
        if isinstance(value, Tensor) and storage_of(value) in self._storages:
            return True
        return id(value) in self._parts

    @cached_property
    def _marks(self) -> set[bytes]:
        return {self._mark(part) for part in _upper_parts(self._state, _DEPTH)}

    def has_equal(self, value: Any) -> bool:
        """Return whether the state holds an equal value, such as a copy."""
        return self._mark(value) in self._marks

    def has_state(self, state: Any) -> bool:
        """Return whether the state of another object is a part of this one."""
        tensors = [part for _, part in _parts_of(state, {}) if isinstance(part, Tensor)]
        if tensors and {storage_of(part) for part in tensors} <= self._storages:
            return True
        return self.has_equal(state)


def _parts_of(value: Any, seen: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Yield everything in a state that has an identity of its own."""
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


def _upper_parts(value: Any, depth: int) -> Iterator[Any]:
    """Yield the containers, tensors and arrays in a state, down to a depth."""
    if isinstance(value, dict | list | tuple | set | Tensor | np.ndarray):
        yield value
    if depth and isinstance(value, dict | list | tuple):
        members = value.values() if isinstance(value, dict) else value
        for member in members:
            if type(member) not in ATOMS:
                yield from _upper_parts(member, depth - 1)

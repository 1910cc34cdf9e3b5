"""What an object's own ``state_dict`` holds, to find what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, final

from torch import Tensor

from helios.core.memory import storage_of
from helios.run_state.values import ATOMS


@final
class Coverage:
    """The content of a state: the very objects in it, and copies under their names.

    Args:
        state: what ``state_dict`` returned.
        mark: returns what is equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._whole = state
        self._state = state if isinstance(state, dict) else {}
        self._mark = mark

    @cached_property
    def _parts(self) -> dict[int, Any]:
        return dict(_parts_of(self._whole, {}))

    @cached_property
    def _storages(self) -> set[int]:
        tensors = [part for part in self._parts.values() if isinstance(part, Tensor)]
        return set(map(storage_of, tensors)) - {0}

    def has(self, key: Any, value: Any) -> bool:
        """Return whether the state holds a value itself: under its own key, or anywhere in it."""
        if type(value) in ATOMS:
            return key in self._state and self._state[key] is value
        if isinstance(value, Tensor) and storage_of(value) in self._storages:
            return True
        return id(value) in self._parts

    def has_copy(self, key: Any, value: Any) -> bool:
        """Return whether the state holds an equal value under the same key.

        An equal value under another key may be equal by chance.
        """
        names = {key, key.lstrip("_")} if isinstance(key, str) else {key}
        known = [self._state[name] for name in names if name in self._state]
        return any(self._mark(part) == self._mark(value) for part in known)

    def has_state(self, key: str, state: Any) -> bool:
        """Return whether the state of an attribute's object is a part of this one."""
        tensors = [part for _, part in _parts_of(state, {}) if isinstance(part, Tensor)]
        if tensors and {storage_of(part) for part in tensors} <= self._storages:
            return True
        return self.has_copy(key, state)


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

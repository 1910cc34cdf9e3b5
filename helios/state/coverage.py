"""Finds what the own ``state_dict`` of an object or of a whole owner contains already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, final

from torch import Tensor

from helios.core.memory import storage_of
from helios.state.values import ATOMS, each_in, elements_of

EXTRA = "_extra_state"
"""The key of a module's extra state in torch."""


@final
class Coverage:
    """The content of a state: the same objects, and equal ones under the same key.

    An equal value under another key may be a coincidence.

    Args:
        state: what ``state_dict`` returned.
        mark: returns marks that are equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._state, self._mark = state, mark

    @cached_property
    def _parts(self) -> dict[int, Any]:
        parts = (part for part in each_in(self._state, elements_of) if type(part) not in ATOMS)
        return {id(part): part for part in parts}

    @cached_property
    def _places(self) -> set[int]:
        tensors = (part for part in self._parts.values() if isinstance(part, Tensor))
        return {storage_of(part) for part in tensors} - {0}

    def has(self, path: str, value: Any) -> bool:
        """Return whether the state contains a value.

        Args:
            path: where the value is in what returned the state.
            value: an attribute, or the state of an object inside.
        """
        if type(value) not in ATOMS:
            if id(value) in self._parts:
                return True
            if isinstance(value, Tensor) and storage_of(value) in self._places:
                return True
        found = self._state
        for key in path.split("."):
            found = _member(found, key)
        return found is value or (found is not None and self._mark(found) == self._mark(value))

    def has_state(self, path: str, state: Any) -> bool:
        """Return whether the state contains that of an object, possibly in another form."""
        places = {storage_of(part) for part in each_in(state, elements_of) if type(part) is Tensor}
        return bool(places) and places <= self._places or self.has(path, state)


def _member(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(key, value.get(key.lstrip("_")))
    is_number = isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value)
    return value[int(key)] if is_number else None


def coverages(
    states: Mapping[str, Any], own: Any, mark: Callable[[Any], bytes]
) -> dict[str, Coverage]:
    """Return the content of the states of objects and of extra states of modules, by path.

    Args:
        states: by path of the object.
        own: what the owner's own ``state_dict`` returned; ``None`` for an owner without one.
        mark: returns marks that are equal for equal values.
    """
    found = dict(_with_extra_states(states))
    return {
        path: Coverage(state, mark)
        for path, state in (*found.items(), *([("", own)] if own is not None else ()))
    }


def _with_extra_states(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, state in states.items():
        yield path, state
        for name in state:
            if isinstance(name, str) and name.endswith(EXTRA):
                yield f"{path}.{name.removesuffix(EXTRA)}".rstrip("."), state[name]


def contains(found: Mapping[str, Coverage], path: str, state: Any) -> bool:
    """Return whether the state of another object contains that of the object with a path."""
    above = ["", *(path[:end] for end, mark in enumerate(path) if mark == ".")]
    return any(
        found[holder].has_state(path[len(holder) :].lstrip("."), state)
        for holder in above
        if holder in found
    )

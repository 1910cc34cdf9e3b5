"""Determines what an object's own ``state_dict`` holds already, to save only what it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn

from helios.core.memory import storage_of
from helios.state.values import ATOMS

_EXTRA = "_extra_state"


@final
class Coverage:
    """The content of a state: the objects in it, and copies of attributes under the same key.

    Args:
        state: what ``state_dict`` returned.
        mark: returns marks that are equal for equal values.
    """

    def __init__(self, state: Any, mark: Callable[[Any], bytes]) -> None:
        self._state, self._mark = state, mark

    def has(self, key: Any, attributes: Mapping[Any, Any]) -> bool:
        """Return whether the state holds the value of an attribute, or an equal one as its own.

        Args:
            key: the attribute.
            attributes: all attributes of the object.
        """
        value = attributes.get(key)
        table = self._state if isinstance(self._state, dict) else {}
        # An equal value under another key, or that of another attribute, may be a coincidence.
        public = key.lstrip("_") if isinstance(key, str) else key
        names = {key} if public in attributes else {key, public}
        known = [table[name] for name in names if name in table]
        if type(value) in ATOMS:
            return any(each is value for each in known)
        if self._has_tensor(value):
            return True
        return id(value) in self._parts or any(
            self._mark(each) == self._mark(value) for each in known
        )

    @cached_property
    def _parts(self) -> dict[int, Any]:
        return {id(part): part for part in _parts_of(self._state)}

    def _has_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor of which the state has all elements."""
        if not isinstance(value, Tensor) or not storage_of(value):
            return False
        # A slice does not contain the whole tensor that it was taken from.
        return value.nbytes <= self._sizes.get(storage_of(value), 0)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """The bytes that the tensors of the state have of each storage."""
        found = Counter[int]()
        for part in self._parts.values():
            if isinstance(part, Tensor) and storage_of(part):
                found[storage_of(part)] += part.nbytes
        return found


def coverages(
    objects: Mapping[str, Any],
    states: Mapping[str, dict[str, Any]],
    own: dict[str, Any] | None,
    mark: Callable[[Any], bytes],
) -> dict[str, Coverage]:
    """Return what the states of objects hold, by the path of the object or module.

    Args:
        objects: the objects, by path.
        states: what their ``state_dict`` returned; of networks, only extra states count.
        own: what the owner's own ``state_dict`` returned; ``None`` for an owner without one.
        mark: returns marks that are equal for equal values.
    """
    found = {} if own is None else {"": Coverage(own, mark)}
    for path, state in states.items():
        if not isinstance(objects[path], nn.Module):
            found[path] = Coverage(state, mark)
            continue
        for name in state:
            if name.endswith(_EXTRA):
                place = f"{path}.{name.removesuffix(_EXTRA)}".rstrip(".")
                found[place] = Coverage(state[name], mark)
    return found


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield every object in a state."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple) and not ATOMS.issuperset(map(type, part)):
            waiting += part

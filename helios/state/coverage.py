"""Determines what an object's own ``state_dict`` holds already, to save only what it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn

from helios.core.memory import storage_of
from helios.state.networks import size_of, sizes_by_storage
from helios.state.values import ATOMS, parts_of

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
        value: Any = attributes.get(key)
        table = self._state if isinstance(self._state, dict) else {}
        # An equal value under another key, or that of another attribute, may be a coincidence.
        public = key.lstrip("_") if isinstance(key, str) else key
        names = {key} if public in attributes else {key, public}
        known = [table[name] for name in names if name in table]
        if type(value) in ATOMS:
            return any(each is value for each in known)
        home = storage_of(value) if isinstance(value, Tensor) else 0
        if id(value) in self._ids or (home and size_of(value) <= self._sizes[home]):
            return True
        return any(self._mark(each) == self._mark(value) for each in known)

    @cached_property
    def _ids(self) -> set[int]:
        return {id(part) for part in parts_of(self._state)}

    @cached_property
    def _sizes(self) -> Counter[int]:
        return sizes_by_storage(self._state)


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

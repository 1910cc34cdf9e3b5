"""Finds values in the memory of tensors that are saved elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor

from helios.core.memory import address_of, extent_of, is_foreign, root_of, storage_of


class Target(NamedTuple):
    """A position in memory that is saved elsewhere.

    Attributes:
        name: the name of the parameter, buffer or tensor that is saved.
        offset: bytes from its first element.
    """

    name: str
    offset: int


@final
class Storages:
    """The parameters, buffers and other tensors that are saved elsewhere.

    Args:
        named: all of them, by name; a shared storage has the name of the first one.
        others: the names of those that other owners save.
    """

    def __init__(self, named: Mapping[str, Tensor], others: Collection[str] = ()) -> None:
        self._named = named
        self.others = others

    @cached_property
    def _by_address(self) -> dict[int, str]:
        names = {storage_of(self._named[name]): name for name in reversed([*self._named])}
        names.pop(0, None)
        return names

    @cached_property
    def _on_host(self) -> list[int]:
        named = self._named
        return sorted(a for a, name in self._by_address.items() if named[name].device.type == "cpu")

    @cached_property
    def _has_foreign(self) -> bool:
        return any(is_foreign(self._named[name]) for name in self._by_address.values())

    @cached_property
    def _by_identity(self) -> dict[int, str]:
        return {id(self._named[name]): name for name in reversed([*self._named])}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that is one of them, not one that shares its storage."""
        return self._by_identity.get(id(tensor))

    def tensor(self, name: str) -> Tensor | None:
        """Return the tensor of a name; ``None`` if there is none."""
        return self._named.get(name)

    def first_in(self, part: Tensor) -> Tensor | None:
        """Return the tensor that names the storage of a tensor, or ``None``."""
        return self._named.get(self._by_address.get(storage_of(part), ""))

    def may_contain(self, part: Tensor | np.ndarray[Any, Any]) -> bool:
        """Return whether a tensor or array may be in their memory, without looking for it."""
        if not self._named:
            return False
        return isinstance(part, Tensor) or (part.size > 0 and self._may_share(part))

    def find(self, part: Tensor | np.ndarray[Any, Any]) -> Target | None:
        """Return the position of a tensor or array in their memory, or ``None``."""
        if isinstance(part, Tensor):
            name = self._by_address.get(storage_of(part))
            if name is None:
                return None
            return Target(name, part.data_ptr() - self._named[name].data_ptr())
        if not self.may_contain(part):
            return None
        begin, end = extent_of(part)
        number = bisect_right(self._on_host, begin) - 1
        if number < 0 or end > self._end_of(number):
            return None
        name = self._by_address[self._on_host[number]]
        return Target(name, address_of(part) - self._named[name].data_ptr())

    def find_within(self, array: np.ndarray[Any, Any]) -> str | None:
        """Return the name of one that is within an array's memory, or ``None``."""
        if not self.may_contain(array):
            return None
        begin, end = extent_of(array)
        number = max(bisect_right(self._on_host, begin) - 1, 0)
        for near in range(number, len(self._on_host)):
            if self._on_host[near] >= end:
                break
            if begin < self._end_of(near):
                return self._by_address[self._on_host[near]]
        return None

    def _end_of(self, number: int) -> int:
        begin = self._on_host[number]
        return begin + self._named[self._by_address[begin]].untyped_storage().nbytes()

    def _may_share(self, array: np.ndarray[Any, Any]) -> bool:
        # Memory is NumPy's own, unless torch shares it with an array in either direction.
        is_own = array.base is None or isinstance(root_of(array), np.ndarray | bytes)
        return self._has_foreign or not is_own

"""Finds which tensors and arrays share memory, and copies them without separating them.

A value may also lie in the memory of a tensor that is saved elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from helios.core.memory import (
    address_of,
    copied_together,
    extent_of,
    is_foreign,
    overlapping,
    root_of,
    span_of,
    storage_bytes,
    storage_of,
    tensor_on,
)

_Key = TypeVar("_Key", bound=Hashable)
_ALIGNMENT = 16

Group: TypeAlias = tuple[tuple[Any, ...], ...]
"""For each tensor or array in one memory: its name, its distance in bytes, and its form."""


def groups_of(views: Mapping[str, Any]) -> dict[str, Group]:
    """Return the group of each tensor or array that shares memory with others, by its name."""
    groups: dict[str, Group] = {}
    for names in _overlaps(views):
        spans = {name: span_of(views[name]) for name in names}
        begin = min(spans.values())[0]
        group = tuple(
            (name, _address(views[name]) - begin, *layout_of(views[name])) for name in sorted(names)
        )
        groups |= dict.fromkeys(names, group)
    return groups


def _overlaps(views: Mapping[_Key, Any]) -> list[list[_Key]]:
    """Return the names of those that overlap, in lists of two and more."""
    pools: dict[Any, list[_Key]] = {}
    lends = False
    owning: dict[int, _Key] = {}
    for name, part in views.items():
        if isinstance(part, Tensor):
            key: Any = (part.device, storage_of(part))
            lends |= part.is_cpu and not part.untyped_storage().resizable()
        elif part.base is None and owning.setdefault(id(part), name) is name:
            # Hardly any lends its memory to others.
            continue
        else:
            root = root_of(part)
            key = id(root)
            lends |= not isinstance(root, np.ndarray | bytes)
        pools.setdefault(key, []).append(name)
    for number in owning.keys() & pools.keys():
        pools[number].append(owning[number])
    if lends:
        # torch and NumPy may share memory without knowing of each other.
        on_host = [name for name, part in views.items() if _is_on_host(part)]
        apart = set(on_host)
        pools = {key: names for key, names in pools.items() if apart.isdisjoint(names)}
        pools["host"] = on_host
    found: list[list[_Key]] = []
    for names in pools.values():
        if len(names) > 1:
            spans = [span_of(views[name]) for name in names]
            groups = overlapping(spans)
            found += [[names[number] for number in group] for group in groups if len(group) > 1]
    return found


def _storage_key(part: Any) -> Any:
    return (part.device, storage_of(part)) if isinstance(part, Tensor) else id(part)


def _is_on_host(part: Any) -> bool:
    return not isinstance(part, Tensor) or part.is_cpu


def _address(part: Any) -> int:
    return part.data_ptr() if isinstance(part, Tensor) else address_of(part)


def layout_of(part: Any) -> tuple[Any, ...]:
    """Return what a tensor or array must have in common with another one to take its content."""
    if isinstance(part, Tensor):
        return Tensor, part.dtype, tuple(part.shape), part.stride(), part.requires_grad
    kind = repr(part.dtype)
    return np.ndarray, kind, part.shape, part.strides, bool(part.flags.writeable)


def write_elements(target: Any, content: Any) -> None:
    """Write the elements of a tensor or array into another one of the same form."""
    if not isinstance(target, Tensor):
        np.copyto(target, content)
        return
    with torch.no_grad():
        if 0 in target.stride():
            # Of an expanded tensor, each element in memory once.
            seen = tuple(slice(None) if step else slice(1) for step in target.stride())
            target, content = target[seen], content[seen]
        target.copy_(content)


def copies_of(parts: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return copies of tensors and arrays by name; those that share memory share it again."""
    copies: dict[_Key, Any] = {}
    for names in _overlaps(parts):
        members = [parts[name] for name in names]
        is_one = len({_storage_key(each) for each in members}) == 1
        twins = _copied_from_storage(members) if is_one else copied_together(members)[1]
        copies |= zip(names, twins, strict=True)
    for name, part in parts.items():
        if name not in copies:
            copies[name] = _copy(part)
    return copies


def _copied_from_storage(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the part of a storage that some tensors lie in."""
    spans = [span_of(tensor) for tensor in tensors]
    whole = storage_of(tensors[0])
    begin, end = min(spans)[0] - whole, max(end for _, end in spans) - whole
    # Elements of all types keep their alignment.
    begin -= begin % _ALIGNMENT
    block = storage_bytes(tensors[0])[begin:end].clone().untyped_storage()
    return [
        tensor_on(
            *(block, tensor.dtype, tensor.shape, tensor.stride()),
            int(tensor.storage_offset()) - begin // tensor.element_size(),
        ).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]


def _copy(part: Any) -> Any:
    if isinstance(part, Tensor):
        # With the same strides, which may choose the kernel.
        twin = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
        write_elements(twin, part.detach())
        return twin.requires_grad_(part.requires_grad)
    twin = part.copy(order="K")
    twin.flags.writeable = part.flags.writeable
    return twin


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

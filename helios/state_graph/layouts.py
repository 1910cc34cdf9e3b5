"""Where the tensors of networks lie: their forms, and the memory that several of them share.

Memory is shared if tensors overlap in it, or if a plain value sees more of it than a tensor does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from helios.core.memory import (
    fills_its_reach,
    has_plain_bytes,
    is_expanded,
    overlapping,
    span_of,
    storage_bytes,
    storage_of,
    tensor_on,
)
from helios.state_graph.memory_groups import Storages
from helios.state_graph.network_parts import NamedTensor
from helios.state_graph.object_names import ObjectNames
from helios.storage.checksums import tensor_sum

Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The type, shape and strides of a tensor."""

_Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""The shape, strides and offset of a tensor in some memory, in elements."""

_Tensors: TypeAlias = Mapping[str, Tensor]


@final
class Layouts:
    """The tensors of networks, and parameters outside of them, each by its name.

    Args:
        slots: where each tensor of a network is registered.
        loose: parameters outside of networks.
        unsettled: the names of tensors of networks that still have lazy parts.

    Attributes:
        tensors: all that lie in memory that can be read as bytes.
        forms: the forms of all; ``None`` as long as the first batch is to determine them.
        shared: the addresses of storages in which tensors overlap.
        overlapping: tensors whose storages overlap, with the other one and the distance in bytes:
            they were created from arrays that share memory, which torch does not know.
    """

    def __init__(
        self, slots: Mapping[str, NamedTensor], loose: _Tensors, unsettled: Collection[str] = ()
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.forms: dict[str, Form | None] = {}
        self.overlapping: dict[str, tuple[str, int]] = {}
        self._addresses: dict[str, int] = {}
        for name, slot in slots.items():
            self._add(name, slot.tensor, is_settled=name not in unsettled)
        for name, part in loose.items():
            self._add(name, part, is_settled=True)
        self.shared = self._find_overlaps()

    def _add(self, name: str, part: Tensor, *, is_settled: bool) -> None:
        if is_lazy(part):
            self.forms[name] = None
            return
        self.forms[name] = form_of(part) if is_settled else None
        if has_plain_bytes(part) and (address := storage_of(part)):
            self.tensors[name] = part
            self._addresses[name] = address

    def _find_overlaps(self) -> set[int]:
        shared: set[int] = set()
        reached = 0
        last: tuple[str, Tensor] | None = None
        places = [(part.data_ptr(), name, part) for name, part in self.tensors.items()]
        for begin, name, part in sorted(places, key=itemgetter(0)):
            if last is not None and begin < reached and part.numel():
                if _see_the_same(part, last[1]):
                    self._addresses[name] = self._addresses[last[0]]
                address = self._addresses[name]
                shared.add(address)
                if address != self._addresses[last[0]]:
                    self.overlapping[name] = last[0], begin - last[1].data_ptr()
            is_whole = part.is_contiguous()
            end = begin + part.nbytes if is_whole else span_of(part)[1]
            if not is_whole and is_expanded(part):
                shared.add(self._addresses[name])
            if end > reached:
                reached, last = end, (name, part)
        return shared

    def homes(
        self, storages: Callable[[], Storages], also: Collection[int] = ()
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors in each shared memory, by that through which plain values find it.

        Args:
            storages: returns how plain values find memory.
            also: addresses of further memory.
        """
        addresses = self.shared.union(also)
        if not addresses:
            return {}
        members: dict[int, dict[str, Tensor]] = {}
        for name, part in self.tensors.items():
            address = self._addresses[name]
            if address in addresses:
                members.setdefault(address, {})[name] = part
        names = {id(part): name for name, part in reversed(self.tensors.items())}
        homes: dict[str, dict[str, Tensor]] = {}
        for address, table in members.items():
            # A tensor of another storage in the same memory does not tell what is around it.
            own = [name for name, part in table.items() if storage_of(part) == address]
            anchor = names.get(id(storages().first_in(table[own[0]])), own[0])
            homes[anchor] = {name: table[name] for name in dict.fromkeys([*own, *table])}
        return homes


def layouts_of(found: ObjectNames, loose: _Tensors) -> Layouts:
    """Return where the tensors of an owner lie now."""
    unsettled: set[str] = set()
    for part in found.all_modules().values():
        network = found.networks.of(part)
        if any(issubclass(kind, LazyModuleMixin) for kind in network.kinds):
            unsettled.update(found.names.get(id(slot.tensor), "") for slot in network.tensors)
    return Layouts(registrations_of(found), loose, unsettled)


def registrations_of(found: ObjectNames) -> dict[str, NamedTensor]:
    """Return where the tensors of networks are registered, by name."""
    slots: dict[str, NamedTensor] = {}
    for part in found.all_modules().values():
        for slot in found.networks.of(part).tensors:
            name = found.names.get(id(slot.tensor))
            if name is not None:
                slots.setdefault(name, slot)
    return slots


def _see_the_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have exactly the same elements."""
    places = [
        (part.data_ptr(), part.device, part.dtype, part.shape, part.stride())
        for part in (one, other)
    ]
    return places[0] == places[1]


def form_of(part: Tensor) -> Form:
    strides = part.stride() if part.layout is torch.strided else ()
    return part.dtype, tuple(part.shape), strides


def memory_marks(
    layouts: Layouts, storages: Callable[[], Storages], also: Collection[int]
) -> dict[str, Any]:
    """Return marks that reveal changes of shared memory, also outside of the tensors in it.

    Args:
        layouts: where tensors lie now.
        storages: returns how plain values find memory.
        also: addresses of memory of which plain values see more than a tensor does.

    Returns:
        By the name of the tensor through which plain values find the memory: its size, the layout
        of tensors in it, and a checksum of what is around them.
    """
    homes = layouts.homes(storages, also)
    return {anchor: memory_mark(members) for anchor, members in homes.items()}


def geometry_of(part: Tensor, memory: int = 0) -> _Geometry:
    offset = int(part.storage_offset())
    if memory and (address := storage_of(part)) != memory:
        offset += (address - memory) // part.element_size()
    return tuple(part.shape), part.stride(), offset


def geometries_of(members: _Tensors) -> dict[str, _Geometry]:
    memory = storage_of(next(iter(members.values())))
    return {name: geometry_of(part, memory) for name, part in members.items()}


def memory_mark(members: _Tensors, before: Any = None) -> Any:
    """Return the mark of memory, without what is around it if it differs anyway."""
    first = next(iter(members.values()))
    mark = first.dtype, first.untyped_storage().nbytes(), geometries_of(members)
    if before is not None and mark != before[:3]:
        return mark
    return *mark, [tensor_sum(piece) for piece in around(members)]


def around(members: _Tensors) -> Iterator[Tensor]:
    """Yield the memory that no tensor sees; for strided tensors as one piece with zeros in it."""
    parts = list(members.values())
    whole = storage_bytes(parts[0])
    start = whole.data_ptr()
    spans = [span_of(part) for part in parts]
    end = start
    for group in overlapping(spans):
        first = min(spans[number][0] for number in group)
        yield whole[end - start : first - start]
        end = max(spans[number][1] for number in group)
        if not all(fills_its_reach(parts[number]) for number in group):
            looking = [parts[number] for number in group]
            yield _without(looking, whole, first - start, end - start)
    yield whole[end - start :]


def _without(parts: Iterable[Tensor], whole: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of some memory with zeros in place of tensors."""
    # Keep the alignment of the elements.
    begin -= begin % 16
    copy = whole[begin:end].clone()
    for part in parts:
        size = part.element_size()
        is_seen = torch.zeros(len(copy) // size, dtype=torch.uint8, device=copy.device)
        shape, steps, offset = geometry_of(part)
        place = shape, steps, offset - begin // size
        seen = tensor_on(is_seen.untyped_storage(), torch.uint8, *place)
        written(seen, steps).fill_(1)
        copy[: len(is_seen) * size].view(-1, size)[is_seen.bool()] = 0
    return copy


def written(part: Tensor, steps: Iterable[int]) -> Tensor:
    """Return the elements of a tensor that are not expanded by these strides."""
    return part[tuple(slice(None) if step else slice(1) for step in steps)]

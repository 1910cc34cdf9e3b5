"""Saves and restores memory that several tensors or values view, each with other elements.

Tensors with exactly the same elements are ties. Here tensors of networks overlap otherwise, or a
plain value extends beyond the tensor whose memory it shares. If training has changed their layout
or the memory around them, it is saved as a whole, and a resume restores all views of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
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
from helios.state_graph.changes import Changes
from helios.state_graph.graph import Graph
from helios.state_graph.module_state import Parameters, storages_of
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.save_times import SaveTimes
from helios.state_graph.storages import Storages
from helios.state_graph.tied_tensors import tensors_of_networks, ties_of
from helios.storage.checksums import tensor_sum

_Tensors: TypeAlias = Mapping[str, Tensor]
_Layout: TypeAlias = dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]
"""The shape, strides and offset of each tensor in some memory, by name."""


def block_marks(graph: Graph, shared: Collection[int]) -> dict[str, Any]:
    """Return marks that reveal changes of shared memory outside of the tensors in it.

    Args:
        graph: what the owner holds now.
        shared: as :func:`find_blocks` finds them.

    Returns:
        By the name of the tensor through which plain values find the memory: its size, the layout
        of tensors in it, and a checksum of what is around them.
    """
    return {anchor: _mark(members) for anchor, members in _groups(graph, shared).items()}


def find_blocks(
    graph: Graph,
    changes: Changes,
    before: Mapping[str, Any],
    *,
    limit: int,
    times: SaveTimes,
) -> dict[str, Any]:
    """Return shared memory; what is too large is reported in the changes instead.

    Args:
        graph: what the owner holds now.
        changes: of plain values, with the storages of which they see more than a tensor.
        before: what :func:`block_marks` returned after setup.
        limit: maximum bytes of plain values.
        times: measures reading memory.

    Returns:
        By the name of the tensor through which plain values find it: ``members``, the shape,
        strides and offset of each tensor in it, by name; and the whole ``memory``, with the
        ``tail`` of bytes that do not fill an element, or ``None`` if training has changed nothing
        but these tensors.
    """
    blocks: dict[str, Any] = {}
    room = changes.room
    shared = graph.ties.overlapping | changes.reached.keys()
    for anchor, members in _groups(graph, shared).items():
        places = changes.reached.get(storage_of(next(iter(members.values()))), [])
        begin = times.clock()
        mark = before.get(anchor)
        is_changed = mark is None or mark != _mark(members, mark)
        seconds = times.clock() - begin
        for place in places:
            times.add(place, seconds / len(places))
        memory = tail = None
        if is_changed:
            size = sum(piece.numel() for piece in _around(members)) if places else 0
            if size > room:
                changes.refuse(places, limit)
                continue
            room -= size
            memory, tail = _content(members[anchor])
        blocks[anchor] = {"members": _layout(members), "memory": memory, "tail": tail}
    return blocks


def part_memory(
    found: ObjectNames, parameters: Parameters, blocks: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Give tensors that overlap others, or themselves, memory of their own, so that each can load.

    Those of a block that is unchanged since setup keep their memory.

    Args:
        found: what setup has made.
        parameters: its parameters.
        blocks: what :func:`find_blocks` returned.

    Returns:
        The tensors through which plain values find the memory that setup gave them, by the name
        of the block that belongs there.
    """
    found = found.anew()
    tensors = dict(_tensors(found, parameters))
    shared = ties_of(found, parameters).overlapping
    parted = {id(part): part for part in tensors.values() if is_expanded(part)}
    homes: dict[str, Tensor] = {}
    if shared or blocks:
        groups = _grouped(tensors, storages_of(found, parameters))
        homes = {
            anchor: members[anchor].detach()
            for anchor, members in groups.items()
            if anchor in blocks and _may_stay(blocks[anchor], members)
        }
        for anchor, members in groups.items():
            stays = anchor in homes and blocks[anchor]["memory"] is None
            if storage_of(members[anchor]) in shared and not stays:
                kept = _key(members[anchor])
                leaving = (part for part in members.values() if _key(part) != kept)
                parted |= {id(part): part for part in leaving}
    clones = {_key(part): part.detach().clone() for part in parted.values()}
    # Tied tensors stay tied.
    for part, clone in [(part, clones[_key(part)]) for part in parted.values()]:
        part.data = clone
    return homes


def restore_blocks(
    blocks: Mapping[str, Any], found: ObjectNames, parameters: Parameters, homes: _Tensors
) -> None:
    """Let tensors view the same memory again, after they were loaded.

    Args:
        blocks: what :func:`find_blocks` returned.
        found: what setup has made.
        parameters: the tensors among it that training updates.
        homes: what :func:`part_memory` returned.
    """
    tensors = dict(_tensors(found.anew(), parameters)) if blocks else {}
    for anchor, block in blocks.items():
        members = {name: place for name, place in block["members"].items() if name in tensors}
        if anchor not in members:
            continue
        if block["memory"] is not None:
            whole = _filled(block, members[anchor][2], tensors[anchor], homes.get(anchor))
        elif anchor in homes:
            whole = storage_bytes(homes[anchor])
        else:
            # Setup gives them another layout now.
            continue
        for name, place in members.items():
            view = tensor_on(whole.untyped_storage(), tensors[name].dtype, *place)
            if block["memory"] is None and storage_of(view) != storage_of(tensors[name]):
                steps = view.stride()
                _written(view, steps).copy_(_written(tensors[name].detach(), steps))
            tensors[name].data = view


def crossings(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Return the tensors that overlap one of another owner, with its name and their layout."""
    near: dict[int, list[tuple[str, Tensor]]] = {}
    for name, part in graph.others.items():
        if has_plain_bytes(part):
            near.setdefault(storage_of(part), []).append((name, part))
    crossing: dict[str, tuple[Any, ...]] = {}
    for name, part in _tensors(graph.found, graph.parameters) if near else ():
        for other, theirs in near.get(storage_of(part), ()):
            (begin, end), (first, last) = span_of(part), span_of(theirs)
            if max(begin, first) < min(end, last):
                distance = begin - first
                crossing.setdefault(name, (other, distance, *_place(part)))
    return crossing


def _tensors(found: ObjectNames, parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
    for name, part in (*tensors_of_networks(found), *parameters.loose.items()):
        if not is_lazy(part) and has_plain_bytes(part) and storage_of(part):
            yield name, part


def _groups(graph: Graph, shared: Collection[int]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the storages, by the tensor through which plain values find them."""
    if not shared:
        return {}
    tensors = _tensors(graph.found, graph.parameters)
    return _grouped(
        {name: part for name, part in tensors if storage_of(part) in shared}, graph.storages
    )


def _grouped(tensors: _Tensors, storages: Storages) -> dict[str, dict[str, Tensor]]:
    names = {id(part): name for name, part in reversed([*tensors.items()])}
    anchors: dict[int, str] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, part in tensors.items():
        anchor = anchors.get(storage_of(part))
        if anchor is None:
            anchor = names.get(id(storages.first_in(part)), name)
            anchors[storage_of(part)] = anchor
        groups.setdefault(anchor, {})[name] = part
    return groups


def _key(part: Tensor) -> tuple[Any, ...]:
    return part.data_ptr(), part.dtype, *_place(part)


def _place(part: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(part.shape), part.stride(), int(part.storage_offset())


def _layout(members: _Tensors) -> _Layout:
    return {name: _place(part) for name, part in members.items()}


def _mark(members: _Tensors, before: Any = None) -> Any:
    """Return the mark of memory, without what is around it if it differs anyway."""
    first = next(iter(members.values()))
    mark = first.dtype, first.untyped_storage().nbytes(), _layout(members)
    if before is not None and mark != before[:3]:
        return mark
    return *mark, [tensor_sum(piece) for piece in _around(members)]


def _around(members: _Tensors) -> Iterator[Tensor]:
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
        shape, steps, offset = _place(part)
        place = shape, steps, offset - begin // size
        seen = tensor_on(is_seen.untyped_storage(), torch.uint8, *place)
        _written(seen, steps).fill_(1)
        copy[: len(is_seen) * size].view(-1, size)[is_seen.bool()] = 0
    return copy


def _may_stay(block: Mapping[str, Any], members: _Tensors) -> bool:
    return block["memory"] is not None or block["members"] == _layout(members)


def _filled(block: Mapping[str, Any], offset: int, anchor: Tensor, home: Tensor | None) -> Tensor:
    """Return memory with the content of a block; that of setup, if it fits."""
    memory, tail = block["memory"], block["tail"]
    if memory.dtype != anchor.dtype:
        memory, tail = memory.to(anchor.dtype), tail[:0]
    num_bytes = memory.nbytes + len(tail)
    whole = None if home is None else storage_bytes(home)
    # Values that view the memory of setup must find the content there.
    if whole is None or home is None or len(whole) != num_bytes or home.storage_offset() != offset:
        whole = torch.empty(num_bytes, dtype=torch.uint8, device=anchor.device)
    whole[: memory.nbytes].copy_(memory.view(torch.uint8))
    whole[memory.nbytes :].copy_(tail)
    return whole


def _written(part: Tensor, steps: Iterable[int]) -> Tensor:
    """Return the elements of a tensor that are not expanded by these strides."""
    return part[tuple(slice(None) if step else slice(1) for step in steps)]


def _content(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the memory of a tensor, as elements of its type and the remaining bytes."""
    whole = storage_bytes(part)
    length, left = divmod(len(whole), part.element_size())
    memory = tensor_on(part.untyped_storage(), part.dtype, (length,), (1,), 0)
    return memory, whole[len(whole) - left :].clone()

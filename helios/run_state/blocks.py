"""Memory that several look at: views of one buffer or array, each with other elements.

Tensors that look at the very same elements are ties. Here tensors of networks overlap otherwise,
or a plain value reaches beyond the tensor whose memory it shares. Such memory is saved whole, and a
resume lets all tensors look where they looked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.core.memory import has_plain_bytes, is_expanded, storage_of, tensor_on
from helios.run_state.found import Found
from helios.run_state.parts import Parameters, storages_of
from helios.run_state.scene import Scene
from helios.run_state.ties import tensors_of_networks, ties_of
from helios.run_state.values import Storages


def find_blocks(scene: Scene, shared: Collection[int]) -> dict[str, Any]:
    """Return the memory that several look at.

    Args:
        scene: what is there now.
        shared: the storages in which tensors overlap, and those of which plain values see more
            than a tensor that is saved.

    Returns:
        By the name of the tensor by which plain values find it: the whole ``memory``, and
        ``members``, the shape, strides and offset of each tensor that lies there, by name.
    """
    if not shared:
        return {}
    members = _members(dict(_tensors(scene.found, scene.parameters)), shared)
    anchors = _anchors(members, scene.storages)
    blocks: dict[str, Any] = {}
    for name, part in members.items():
        block = blocks.setdefault(anchors[storage_of(part)], {"memory": _whole(part)})
        geometry = tuple(part.shape), part.stride(), part.storage_offset()
        block.setdefault("members", {})[name] = geometry
    return blocks


def part_memory(found: Found, parameters: Parameters) -> dict[str, Tensor]:
    """Give tensors that overlap others, or themselves, memory of their own, so that each can load.

    Args:
        found: what setup has made.
        parameters: of it.

    Returns:
        What looks at the memory that they had, by name.
    """
    tensors = dict(_tensors(found, parameters))
    parted = {name: part for name, part in tensors.items() if is_expanded(part)}
    members = _members(tensors, ties_of(found, parameters).overlapping)
    if members:
        anchors = _anchors(members, storages_of(found, parameters))
        kept = {id(members[name]) for name in anchors.values()}
        parted |= {name: part for name, part in members.items() if id(part) not in kept}
    before = {name: part.detach() for name, part in parted.items()}
    for part in {id(part): part for part in parted.values()}.values():
        part.data = part.detach().clone()
    return before


def restore_blocks(
    blocks: Mapping[str, Any], found: Found, parameters: Parameters, before: Mapping[str, Tensor]
) -> None:
    """Let tensors look at the same memory again; to be called after they were loaded.

    Args:
        blocks: what :func:`find_blocks` returned.
        found: what setup has made.
        parameters: the tensors that training moves among it.
        before: what :func:`part_memory` returned.
    """
    tensors = dict(_tensors(found, parameters)) if blocks else {}
    for anchor, block in blocks.items():
        members = {name: place for name, place in block["members"].items() if name in tensors}
        if anchor not in members:
            continue
        memory = block["memory"]
        present = before.get(anchor, tensors[anchor])
        whole = _whole(present)
        # What looks at it where setup let it look must find it there.
        if len(whole) == len(memory) and present.storage_offset() == members[anchor][2]:
            whole.copy_(memory)
        else:
            whole = memory.to(present.device, copy=True)
        for name, (shape, strides, offset) in members.items():
            view = tensor_on(whole.untyped_storage(), whole.dtype, shape, strides, offset)
            tensors[name].data = view


def _tensors(found: Found, parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
    for name, part in (*tensors_of_networks(found), *parameters.loose.items()):
        if not is_lazy(part) and has_plain_bytes(part) and storage_of(part):
            yield name, part


def _members(tensors: Mapping[str, Tensor], shared: Collection[int]) -> dict[str, Tensor]:
    return {name: part for name, part in tensors.items() if storage_of(part) in shared}


def _anchors(members: Mapping[str, Tensor], storages: Storages) -> dict[int, str]:
    """Return the name, for each storage, of the tensor by which plain values find it."""
    names = {id(part): name for name, part in reversed([*members.items()])}
    anchors: dict[int, str] = {}
    for name, part in members.items():
        anchor = names.get(id(storages.first_in(part)), name)
        anchors.setdefault(storage_of(part), anchor)
    return anchors


def _whole(part: Tensor) -> Tensor:
    storage = part.untyped_storage()
    return tensor_on(storage, part.dtype, (storage.nbytes() // part.element_size(),), (1,), 0)

"""The rows of sharded tensors that one process saves, apart from the rest of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from helios.core.sharded_tensors import OwnRows, RowShare, local_of, replace_sharded
from helios.core.utils import memory_of
from helios.errors import StateError
from helios.storage.staging import HostBuffers
from helios.storage.type_converters import ShardedValue


def split_sharded(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, OwnRows]]:
    """Return a payload without sharded tensors, and the rows of these by their path.

    Tied tensors are the same object under each of their paths.

    Raises:
        StateError: if a tensor is sharded in a way that cannot be saved.
    """
    rows: dict[str, OwnRows] = {}
    seen: dict[Any, OwnRows] = {}
    # Asking a mesh takes as long as copying some ten thousand elements.
    shares: dict[int, RowShare] = {}

    def take(path: str, tensor: Any) -> ShardedValue:
        name = path.removeprefix(".")
        while name in rows:
            name += "'"
        local = local_of(tensor)
        # Also where this process has no row, and so no address: all must see the same ties.
        place = (memory_of(local), local.storage_offset(), tensor.shape, tensor.dtype)
        if place not in seen:
            mesh = tensor.device_mesh
            if id(mesh) not in shares:
                shares[id(mesh)] = RowShare(mesh.get_local_rank(), mesh.size())
            seen[place] = _rows_of(name, tensor, shares[id(mesh)])
        rows[name] = seen[place]
        return ShardedValue(name)

    return replace_sharded(payload, take), rows


def refer_to_sharded(tree: Any, root: str) -> Any:
    """Return a part of a payload with the references of :func:`split_sharded` to its tensors."""
    return replace_sharded(tree, lambda path, _: ShardedValue(path), root=root)


def _rows_of(name: str, tensor: Any, share: RowShare) -> OwnRows:
    placements = tensor.placements
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise StateError(
            f"{name} is sharded as {placements}, but a checkpoint holds shards of rows only. Save "
            "a tensor that is sharded on dimension 0 of a mesh of one dimension."
        )
    first, _ = share.rows(tensor.shape[0])
    return OwnRows(local_of(tensor).detach(), first, tuple(tensor.shape))


def copy_rows(rows: Mapping[str, OwnRows], buffers: HostBuffers | None) -> Mapping[str, OwnRows]:
    """Return rows with copies of their tensors, or without buffers the rows themselves."""
    if buffers is None:
        return rows
    copies = {
        id(own): dataclasses.replace(own, tensor=_without_rest(own.tensor)) for own in rows.values()
    }
    buffers.copy([own.tensor] for own in copies.values() if own.tensor.numel())
    return {name: copies[id(own)] for name, own in rows.items()}


def _without_rest(tensor: Tensor) -> Tensor:
    """Return a view of a tensor; a copy, if it is a small part of a storage, which is copied."""
    view = tensor.detach()
    return view.clone() if 2 * view.nbytes < view.untyped_storage().nbytes() else view

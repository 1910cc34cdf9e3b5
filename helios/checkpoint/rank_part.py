"""What one process writes of a sharded checkpoint, and how it tells rank 0.

Processes do not communicate while they write: each leaves a note beside its file, after the file is
on the disk, and rank 0 commits the checkpoint when it has found all notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from helios.checkpoint.shard_index import RankNote, Rows, rank_file
from helios.checkpoint.writer_thread import WriterThread
from helios.core.sharded_tensors import RowShare, local_of, replace_sharded
from helios.errors import SaveError, StateError
from helios.storage import files
from helios.storage.shard_file import dtype_code, write_shard_file
from helios.storage.staging import HostBuffers
from helios.storage.type_converters import ShardedValue


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """What all processes must know of a sharded save.

    Attributes:
        path: the folder of the checkpoint.
        token: distinguishes this save from others to the same path.
        num_ranks: the number of processes.
        hashes: whether to compute digests.
    """

    path: Path
    token: str
    num_ranks: int
    hashes: bool

    @property
    def draft(self) -> Path:
        """The folder that is renamed when it is complete."""
        return files.temporary_path(self.path)

    def note(self, rank: int) -> Path:
        """Return where a rank says that its file is on the disk."""
        return self.draft / f"rank-{rank:05d}.{self.token}.json"

    def failure(self, rank: int) -> Path:
        """Return where a rank says that its file could not be written."""
        return self.draft / f"rank-{rank:05d}.{self.token}.failed"


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The rows of a tensor that this process holds.

    Attributes:
        tensor: the rows.
        first: the first of them.
        shape: the shape of the whole.
    """

    tensor: Tensor
    first: int
    shape: tuple[int, ...]


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
        storage = local.untyped_storage()._cdata  # noqa: SLF001 - an identity
        place = (storage, local.storage_offset(), tensor.shape, tensor.dtype)
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
    dtype_code(tensor.dtype, name=name)
    first, _ = share.rows(tensor.shape[0])
    return OwnRows(local_of(tensor).detach(), first, tuple(tensor.shape))


@final
class RankPart:
    """The file that this process writes in one save.

    Args:
        plan: the save.
        rank: this process.
        rows: what it holds, which stays unchanged until it is written.
    """

    def __init__(self, plan: SavePlan, rank: int, rows: Mapping[str, OwnRows]) -> None:
        self.plan = plan
        self._rank = rank
        self._rows = rows
        self._note: RankNote | None = None

    def write(self) -> RankNote:
        """Write the file, if it is not written yet; returns what is to be said of it.

        Raises:
            OSError: if the disk fails.
        """
        if self._note is None:
            files.make_folder(self.plan.draft)
            path = self.plan.draft / rank_file(self._rank, self.plan.num_ranks)
            firsts = {id(own): name for name, own in reversed(list(self._rows.items()))}
            tensors = {
                name: own.tensor.cpu().contiguous()
                for name, own in self._rows.items()
                if own.tensor.numel() and firsts[id(own)] == name
            }
            written = write_shard_file(path, tensors, hashes=self.plan.hashes)
            parts = {
                name: Rows(
                    dtype_code(own.tensor.dtype, name=name),
                    own.shape,
                    own.first,
                    len(own.tensor),
                    written.begins.get(firsts[id(own)], 0),
                )
                for name, own in self._rows.items()
            }
            self._note = RankNote(written.size, written.digests, parts)
            self._rows = {}
        return self._note

    def publish(self) -> None:
        """Write the file, and then the note for rank 0.

        Raises:
            SaveError: if the disk fails; rank 0 is told so if the disk allows it.
        """
        try:
            text = self.write().to_json()
            _leave(self.plan.note(self._rank), text)
        except OSError as error:
            failure = SaveError(
                f"rank {self._rank} could not write its part of {self.plan.path}: {error}"
            )
            with contextlib.suppress(OSError):
                _leave(self.plan.failure(self._rank), str(failure))
            raise failure from error


def _leave(path: Path, text: str) -> None:
    """Write a note whole; once it is there, rank 0 may rename its folder."""
    partial = files.temporary_path(path)
    with files.create(partial) as handle:
        files.write(handle, text.encode())
        files.fsync(handle)
    files.replace(partial, path)


@final
class PartWriter:
    """Writes the parts of this process, one save at a time.

    Args:
        rank: this process.
        is_async: whether to copy tensors, so that training may continue while they are written.
        pins: whether the state is on CUDA devices.

    Attributes:
        thread: writes a part while training continues.
    """

    def __init__(self, rank: int, *, is_async: bool, pins: bool) -> None:
        self._rank = rank
        self.thread = WriterThread(
            "helios-checkpoint-part",
            content="the shards of this process",
            copies=is_async,
            pins=pins,
        )
        self._failure: tuple[str, str] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a part could not be written, and rank 0 may not know it yet."""
        return self._failure is not None

    def draft(self, plan: SavePlan, rows: Mapping[str, OwnRows]) -> tuple[RankPart, bool]:
        """Return the part of a save, and whether it stays unchanged while training continues."""

        def make(buffers: HostBuffers | None) -> tuple[RankPart, bool]:
            is_own = buffers is not None
            own = rows if buffers is None else _copy(rows, buffers)
            return RankPart(plan, self._rank, own), is_own

        return self.thread.copying(make)

    def start(self, part: RankPart) -> None:
        """Write a part in a thread."""
        self.thread.start(lambda: self.write(part))

    def write(self, part: RankPart) -> None:
        """Write a part now; a failure is kept for rank 0."""
        try:
            part.publish()
        except Exception as error:
            self._failure = (part.plan.token, str(error))

    def take_failure(self) -> tuple[str, str] | None:
        """Return the token of the save that has failed here and why, once."""
        failure, self._failure = self._failure, None
        return failure


def _copy(rows: Mapping[str, OwnRows], buffers: HostBuffers) -> dict[str, OwnRows]:
    copies = {
        id(own): dataclasses.replace(own, tensor=_without_rest(own.tensor)) for own in rows.values()
    }
    groups: dict[tuple[str, int], list[Tensor]] = {}
    for copy in (own.tensor for own in copies.values()):
        if copy.numel():
            place = (str(copy.device), copy.untyped_storage().data_ptr())
            groups.setdefault(place, []).append(copy)
    buffers.copy(groups.values())
    return {name: copies[id(own)] for name, own in rows.items()}


def _without_rest(tensor: Tensor) -> Tensor:
    """Return a view of a tensor; a copy, if it is a small part of a storage."""
    view = tensor.detach()
    is_small = 2 * view.nbytes < view.untyped_storage().nbytes()
    return view.clone() if is_small else view

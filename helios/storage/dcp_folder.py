"""Tensors in the format of ``torch.distributed.checkpoint``: a folder with a file of each process.

Processes write the rows that they hold, and any number of processes read any rows. What names the
tensors is read by :mod:`helios.storage.dcp_metadata`, never by PyTorch.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from helios.core.sharded_tensors import OwnRows, RowShare, local_of, replace_sharded
from helios.core.utils import memory_of
from helios.errors import DamagedCheckpointError, SaveError, StateError
from helios.storage.codec import find_cause
from helios.storage.container_checks import FilePart, check_container, reason_of, reraise_os_error
from helios.storage.dcp_metadata import METADATA_NAME, StoredChunk, read_metadata
from helios.storage.files import FileFacts
from helios.storage.staging import HostBuffers
from helios.storage.type_converters import ShardedValue


def save_rows(
    folder: Path, rows: Mapping[str, OwnRows], group: ProcessGroup, *, hashes: bool
) -> dict[str, FileFacts]:
    """Write the rows of all processes, which call this together; may be called in a thread.

    Args:
        folder: the same for all processes.
        rows: those of this process by name; one under several names is written once.
        group: connects the processes on the CPU, and nothing else uses it meanwhile.
        hashes: whether to compute digests.

    Returns:
        The files whose bytes are on the disk, by name, on rank 0; nothing on other ranks.

    Raises:
        SaveError: on all processes, if the disk of one of them fails.
        Exception: another error of a process, or that of a collective if a process is gone.
    """
    writer = RowWriter(folder, rows, hashes=hashes)
    try:
        save({}, storage_writer=writer, planner=RowPlanner(rows), process_group=group)
    # It is not an Exception, and has the errors of each process.
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if not isinstance(error, OSError):
            raise error from None
        raise SaveError(f"rank {rank} could not write its part of {folder}: {error}") from error
    return writer.written


@final
class RowPlanner(DefaultSavePlanner):
    """Plans to write the rows of one process.

    Args:
        rows: as in :func:`save_rows`.
    """

    def __init__(self, rows: Mapping[str, OwnRows]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rows = {names[0]: own for names, own in _by_tensor(rows)}

    def create_local_plan(self) -> planning.SavePlan:
        """Return what this process writes."""
        self.plan = planning.SavePlan([_write_item(*named) for named in self._rows.items()])
        return self.plan

    def lookup_object(self, index: md.MetadataIndex) -> Tensor:
        """Return the rows of a tensor."""
        return self._rows[index.fqn].tensor


def _by_tensor(rows: Mapping[str, OwnRows]) -> list[tuple[list[str], OwnRows]]:
    """Return the names of each tensor; tied ones are one."""
    found: dict[int, tuple[list[str], OwnRows]] = {}
    for name, own in rows.items():
        found.setdefault(id(own), ([], own))[0].append(name)
    return list(found.values())


def _write_item(name: str, own: OwnRows) -> planning.WriteItem:
    begin = _row(own.first, own.shape)
    data = planning.TensorWriteData(
        md.ChunkStorageMetadata(begin, own.tensor.shape),
        md.TensorProperties(dtype=own.tensor.dtype),
        torch.Size(own.shape),
    )
    kind = planning.WriteItemType.SHARD
    return planning.WriteItem(md.MetadataIndex(name, begin), kind, tensor_data=data)


def _row(number: int, shape: tuple[int, ...]) -> torch.Size:
    """Return where a row begins in a tensor."""
    return torch.Size((number, *(0 for _ in shape[1:])))


@dataclasses.dataclass(frozen=True)
class _HashedResult(WriteResult):
    """A part of a tensor that was written, and the whole file."""

    facts: FileFacts


@final
class RowWriter(FileSystemWriter):
    """Writes the files of a folder.

    Args:
        folder: it.
        rows: as in :func:`save_rows`.
        hashes: whether to compute digests.

    Attributes:
        written: what was written by all processes, by name, on rank 0.
    """

    def __init__(self, folder: Path, rows: Mapping[str, OwnRows], *, hashes: bool) -> None:
        super().__init__(folder, sync_files=True)
        self.written: dict[str, FileFacts] = {}
        self._folder = folder
        self._hashes = hashes
        self._names = {names[0]: names for names, _ in _by_tensor(rows)}

    def storage_meta(self) -> None:
        """Return nothing: the path of an unfinished folder tells nobody anything."""

    def write_data(
        self, plan: planning.SavePlan, planner: planning.SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write and hash the file of this process."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # Other processes get the error without its cause.
            raise find_cause(error) from None
        for name in {result.storage_data.relative_path for result in results}:
            facts = self._facts_of(name)
            results = [_HashedResult(**vars(result), facts=facts) for result in results]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _facts_of(self, name: str) -> FileFacts:
        return FileFacts.of(self._folder / name, hashes=self._hashes)

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on rank 0, where tied tensors are the same part of a file."""
        tensors = metadata.state_dict_metadata
        parts: list[WriteResult] = []
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _HashedResult)
            self.written[result.storage_data.relative_path] = result.facts
            for name in self._names[result.index.fqn]:
                tensors[name] = tensors[result.index.fqn]
                index = dataclasses.replace(result.index, fqn=name)
                parts.append(dataclasses.replace(result, index=index))
        super().finish(metadata, [parts])
        self.written[METADATA_NAME] = self._facts_of(METADATA_NAME)


@final
class StoredTensor:
    """A tensor in a folder, any rows of which can be read.

    Attributes:
        name: its name.
        shape: the shape of the whole.
        dtype: its type.
        place: what it has in common with tied tensors only.
    """

    def __init__(self, folder: Path, name: str, metadata: md.Metadata) -> None:
        form: Any = metadata.state_dict_metadata[name]
        self.name = name
        self.shape, self.dtype = form.size, form.properties.dtype
        self._folder = folder
        self._chunks = [
            (chunk, metadata.storage_data[md.MetadataIndex(name, chunk.offsets)])
            for chunk in form.chunks
        ]
        self.place: object = self._chunks[0][1] if self._chunks else name

    def read_rows(self, first: int, count: int) -> Tensor:
        """Return rows of the tensor on the CPU, in memory of their own.

        Raises:
            DamagedCheckpointError: if they cannot be read.
            OSError: if the file system cannot read a file.
        """
        found = [torch.empty((0, *self.shape[1:]), dtype=self.dtype)]
        for chunk, place in self._chunks:
            before = chunk.offsets[0]
            begin, end = max(first - before, 0), min(first + count - before, chunk.sizes[0])
            if begin < end:
                found.append(self._read(chunk, place)[begin:end])
                if end - begin == count == chunk.sizes[0]:
                    return found[-1].contiguous()
        return torch.cat(found)

    def _read(self, chunk: md.ChunkStorageMetadata, place: StoredChunk) -> Tensor:
        try:
            with io.BufferedReader(
                FilePart(self._folder / place.name, place.offset, place.length)
            ) as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
            if found.shape != chunk.sizes or found.dtype is not self.dtype:
                raise ValueError("it has another form")
        except Exception as error:
            reraise_os_error(error)
            raise DamagedCheckpointError(
                f"{self._folder} is damaged: {self.name} cannot be read ({reason_of(error)}). "
                "Remove the checkpoint, or use another one."
            ) from error
        tensor: Tensor = found
        return tensor


@final
class TensorFolder:
    """A folder of tensors. Its metadata is read once, and not by PyTorch.

    Raises:
        CheckpointError: as :func:`helios.storage.dcp_metadata.read_metadata`.
        OSError: if the file system cannot read it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_metadata(folder)

    def check(self, names: Collection[str], watch: Callable[[int], object] | None) -> None:
        """Verify the checksums of what files hold; see ``check_container``.

        Raises:
            DamagedCheckpointError: if a part is damaged.
            OSError: if the file system cannot read one.
        """
        for place in self._metadata.storage_data.values():
            if place.name in names:
                part = place.offset, place.length
                check_container(self._folder / place.name, watch, part=part)

    def open_tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by name."""
        names = self._metadata.state_dict_metadata
        return {name: StoredTensor(self._folder, name, self._metadata) for name in names}


# ---- the rows of one process, apart from the rest of its state


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

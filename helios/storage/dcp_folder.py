"""Tensors in the format of ``torch.distributed.checkpoint``: a folder with a file of each process.

Processes write the rows that they hold, and any number of processes read any rows. PyTorch's own
index is a pickle, which can run code: it is written for PyTorch's tools, and never read. Helios
reads its own index of numbers and names.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

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
from helios.storage import codec
from helios.storage.codec import find_cause
from helios.storage.container_checks import FilePart, check_container, reason_of, reraise_os_error
from helios.storage.files import FileFacts
from helios.storage.staging import HostBuffers
from helios.storage.type_converters import ShardedValue

METADATA_NAME = ".metadata"
INDEX_NAME = "index.pth"
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")

_READ_AT_ONCE = 1 << 18


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
        codec.write_file(self._folder / INDEX_NAME, _index_of(metadata))
        for name in (METADATA_NAME, INDEX_NAME):
            self.written[name] = self._facts_of(name)


def _index_of(metadata: md.Metadata) -> dict[str, Any]:
    """Return of each tensor its type and shape, and where its rows are."""
    found = {}
    forms: Mapping[str, Any] = metadata.state_dict_metadata
    for name, form in forms.items():
        chunks = []
        for chunk in sorted(form.chunks, key=lambda each: each.offsets[0]):
            place = metadata.storage_data[md.MetadataIndex(name, chunk.offsets)]
            where = place.relative_path, place.offset, place.length
            chunks.append([chunk.offsets[0], chunk.sizes[0], *where])
        found[name] = {"dtype": form.properties.dtype, "shape": [*form.size], "chunks": chunks}
    return found


class _Chunk(NamedTuple):
    """Some rows of a tensor, and the part of a file that holds them."""

    first: int
    num_rows: int
    file: str
    offset: int
    length: int


@final
class StoredTensor:
    """A tensor in a folder, any rows of which can be read.

    Args:
        folder: the folder.
        name: the name of the tensor.
        entry: what the index says of it.
        sizes: the sizes of the files in the folder.

    Attributes:
        name: its name.
        shape: the shape of the whole.
        dtype: its type.
        chunks: where its rows are, in order.
        place: a key that only tied tensors share.

    Raises:
        Exception: if the index does not describe a whole tensor in files of the folder.
    """

    def __init__(
        self, folder: Path, name: str, entry: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> None:
        self.name = name
        self.dtype = entry["dtype"]
        self.shape = torch.Size(map(_number, entry["shape"]))
        _require(isinstance(self.dtype, torch.dtype), "it has no type")
        self._folder = folder
        self.chunks = [_Chunk(*each) for each in entry["chunks"] if each[1]]
        row, row_bytes = 0, math.prod(self.shape[1:]) * self.dtype.itemsize
        for chunk in self.chunks:
            numbers = map(_number, (chunk.num_rows, chunk.offset, chunk.length))
            count, offset, length = numbers
            # A name with a path would lead out of the folder.
            is_there = _DATA_FILE.fullmatch(chunk.file) and offset + length <= sizes[chunk.file]
            _require(is_there, f"{chunk.file} is too short")
            # What is stored is not compressed. Without this, a file could ask for endless memory.
            is_next = chunk.first == row and length >= count * row_bytes
            _require(is_next, f"{name} lacks rows from {row} on")
            row += count
        is_whole = row == self.shape[0] or not math.prod(self.shape)
        _require(is_whole, f"{name} lacks rows from {row} on")
        self.place: object = self.chunks[0] if self.chunks else name

    def read_rows(self, first: int, count: int) -> Tensor:
        """Return rows of the tensor on the CPU, in memory of their own.

        Raises:
            DamagedCheckpointError: if they cannot be read.
            OSError: if the file system cannot read a file.
        """
        found = []
        for chunk in self.chunks:
            begin = max(first - chunk.first, 0)
            end = min(first + count - chunk.first, chunk.num_rows)
            if begin < end:
                found.append(self._read(chunk)[begin:end])
                if end - begin == count == chunk.num_rows:
                    return found[-1].contiguous()
        return torch.cat(found) if found else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def _read(self, chunk: _Chunk) -> Tensor:
        try:
            with FilePart(self._folder / chunk.file, chunk.offset, chunk.length) as part:
                # torch asks a dozen times, each time for a few bytes.
                is_small = chunk.length <= _READ_AT_ONCE
                file: Any = (
                    io.BytesIO(part.read(chunk.length)) if is_small else io.BufferedReader(part)
                )
                found: Tensor = torch.load(file, map_location="cpu", weights_only=True)
            shape = (chunk.num_rows, *self.shape[1:])
            _require(found.shape == shape and found.dtype is self.dtype, "it has another form")
        except Exception as error:
            reraise_os_error(error)
            raise DamagedCheckpointError(
                f"{self._folder} is damaged: {self.name} cannot be read ({reason_of(error)}). "
                "Remove the checkpoint, or use another one."
            ) from error
        return found


def _number(value: Any) -> int:
    _require(type(value) is int and value >= 0, f"{value!r} is not a number")
    return int(value)


def _require(is_so: Any, problem: str) -> None:
    if not is_so:
        raise ValueError(problem)


@final
class TensorFolder:
    """A folder of tensors, whose index is read once.

    Attributes:
        tensors: the tensors by name.

    Raises:
        CheckpointError: if the index cannot be read, or describes no whole tensors.
        OSError: if the file system cannot read it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = codec.read(folder / INDEX_NAME)
        sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
        try:
            self.tensors = {
                name: StoredTensor(folder, name, entry, sizes) for name, entry in index.items()
            }
        except Exception as error:
            raise DamagedCheckpointError(
                f"{folder / INDEX_NAME} is damaged: it does not describe the tensors of a "
                f"checkpoint ({error}). Remove the checkpoint, or use another one."
            ) from error

    def check(self, names: Collection[str], watch: Callable[[int], object] | None) -> None:
        """Verify the checksums of what files hold; see ``check_container``.

        Raises:
            DamagedCheckpointError: if a part is damaged.
            OSError: if the file system cannot read one.
        """
        for chunk in {each for tensor in self.tensors.values() for each in tensor.chunks}:
            if chunk.file in names:
                part = chunk.offset, chunk.length
                check_container(self._folder / chunk.file, watch, part=part)


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
    copies = {}
    for own in rows.values():
        view = own.tensor.detach()
        # The whole storage of a view is copied.
        is_small = 2 * view.nbytes < view.untyped_storage().nbytes()
        copies[id(own)] = dataclasses.replace(own, tensor=view.clone() if is_small else view)
    buffers.copy([own.tensor] for own in copies.values() if own.tensor.numel())
    return {name: copies[id(own)] for name, own in rows.items()}

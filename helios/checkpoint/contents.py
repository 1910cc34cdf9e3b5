"""The two forms of a checkpoint, a file or a folder: how each is verified and read.

A sharded checkpoint is a folder. Its tensors are read whole, or each process reads its rows only,
and verifies what it touches. Files are mapped when they are first touched, so that a running
training may delete the checkpoint meanwhile.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from helios.checkpoint import file_names, schema_upgrades
from helios.checkpoint.shard_index import (
    INDEX_NAME,
    RECORD_NAME,
    RowRange,
    ShardedTensor,
    ShardIndex,
    row_bytes,
)
from helios.checkpoint.sidecar import Sidecar
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage.container_checks import check_container, check_directory
from helios.storage.digest import BLOCK_BYTES, VerifiedBlocks, digest_file

if TYPE_CHECKING:
    from torch import Tensor

    from helios.core.sharded_tensors import RowShare

# Files that systems put into folders, of which nobody knows.
_STRAY = (".nfs", ".DS_Store", "Thumbs.db", "desktop.ini")


class Contents(ABC):
    """What a checkpoint consists of.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder.

    Attributes:
        path: as given.
        record_path: the file of the record.
        watch: called with numbers of bytes while they are compared; ``None`` if nobody asks.
    """

    def __init__(self, path: Path, record_path: Path) -> None:
        self.path = path
        self.record_path = record_path
        self.watch: Callable[[int], object] | None = None

    @property
    @abstractmethod
    def size(self) -> int:
        """The size of all files in bytes."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest that a sidecar holds, computed from the file."""

    @abstractmethod
    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the bytes with what was written.

        Args:
            sidecar: holds the digest; without one, the checksums of the container's records are
                used.
            share: compare only what one process needs of sharded tensors.

        Returns:
            Whether every byte of the record was compared with a digest.

        Raises:
            DamagedCheckpointError: if the bytes differ.
            IncompatibleCheckpointError: if they are those of the old file that it was migrated
                from.
            OSError: if the file system cannot read a file.
        """

    @abstractmethod
    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the record; its tensors are on the CPU.

        Args:
            safe_types: types that may be created.
            maps: whether tensors of the record may be mapped from the file.
            share: what this process holds of the networks: their sharded tensors are deferred
                then, and others are whole.

        Raises:
            Exception: as :func:`helios.storage.codec.read`.
        """

    @abstractmethod
    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the record with deferred tensors, and the rejected names.

        Raises:
            Exception: as :func:`helios.storage.codec.read_structure`.
        """

    def check_container(self) -> None:
        """Check the container of the record; raises as :func:`check_directory`."""
        check_directory(self.record_path)


@final
class WholeFile(Contents):
    """A checkpoint that is one file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, path)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        with self.path.open("rb") as handle:
            return os.fstat(handle.fileno()).st_size

    @property
    def digest(self) -> str:
        """The digest of the file."""
        return digest_file(self.path)

    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the file with its digest; see the base."""
        path = self.path
        if sidecar is not None and sidecar.digest:
            found = digest_file(path, self.watch)
            if found != sidecar.digest:
                if found == sidecar.extra.get(file_names.SOURCE_DIGEST):
                    # The old file was put back: it is intact, and must not be renamed.
                    raise schema_upgrades.unmigrated(path)
                raise DamagedCheckpointError(
                    f"{path} is damaged: its bytes do not match the digest in its sidecar. "
                    "Remove it, or use another checkpoint."
                )
            return True
        check_container(path, self.watch)
        return False

    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the file; see the base."""
        from helios.storage import codec

        return codec.read(self.path, safe_types, maps=maps)

    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the file; see the base."""
        from helios.storage import codec

        return codec.read_structure(self.path)


@final
class ShardedFolder(Contents):
    """A checkpoint that is a folder.

    Args:
        path: the folder.

    Raises:
        DamagedCheckpointError: if a file is missing, or has another size than when it was written.
        IncompatibleCheckpointError: if it holds a file that no save has written, or was written in
            a later format.
        OSError: if the file system cannot read it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, path / RECORD_NAME)
        self.index_path = path / INDEX_NAME
        try:
            text = self.index_path.read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            raise missing(self.index_path) from None
        self.index = ShardIndex.from_json(text, name=str(self.index_path))
        self.reader = ShardReader(path, self.index)
        self._check_files()

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        own = self.index_path.stat().st_size + self.index.record.size
        return own + sum(file.size for file in self.index.files)

    def _check_files(self) -> None:
        for file in (self.index.record, *self.index.files):
            path = self.path / file.name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise missing(path) from None
            if size != file.size:
                raise wrong_size(path, size, file.size)
        for path in sorted(self.path.iterdir()):
            if path.name not in self.index.names and not path.name.startswith(_STRAY):
                raise IncompatibleCheckpointError(
                    f"{path} is not part of the checkpoint that was written. Nothing was read or "
                    "renamed: move it out of the folder."
                )

    @property
    def digest(self) -> str:
        """The digest of the index, which has those of all other files."""
        return digest_file(self.index_path)

    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the index with the sidecar, and other files with the index; see the base."""
        is_confirmed = sidecar is not None and bool(sidecar.digest)
        if sidecar is not None and sidecar.digest not in ("", self.digest):
            raise DamagedCheckpointError(
                f"{self.index_path} is damaged: its bytes do not match the digest in the sidecar. "
                "Remove the checkpoint, or use another one."
            )
        digests = self.index.record.digests
        if digests and (digest_file(self.record_path, self.watch),) != digests:
            raise DamagedCheckpointError(
                f"{self.record_path} is damaged: its bytes do not match the digest in the index. "
                "Remove the checkpoint, or use another one."
            )
        if not digests:
            check_container(self.record_path, self.watch)
        self.reader.verify(share, self.watch)
        return is_confirmed and bool(digests)

    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the record, and sharded tensors whole or not yet; see the base."""
        from helios.storage import codec

        finder = _Finder(self, () if share is None else share.prefixes)
        return codec.read(self.record_path, safe_types, maps=maps, find_sharded=finder.find)

    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the record with deferred tensors; see the base."""
        from helios.storage import codec

        return codec.read_structure(self.record_path, _Finder(self, ("",)).find)

    def defer(self, name: str) -> Tensor:
        """Return what stands for a sharded tensor until it is read."""
        import torch

        from helios.core.sharded_tensors import make_deferred_tensor
        from helios.storage.shard_file import dtype_of

        tensor = self.index.tensors.get(name)
        if tensor is None:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: its index lacks the tensor {name}. Remove the "
                "checkpoint, or use another one."
            )
        return make_deferred_tensor(
            torch.Size(tensor.shape), dtype_of(tensor.code), _NamedRows(self.reader, name)
        )


@final
class _Finder:
    """Finds the tensors of one reading; tied ones are one tensor."""

    def __init__(self, folder: ShardedFolder, prefixes: tuple[str, ...]) -> None:
        self._folder = folder
        self._prefixes = prefixes
        self._found: dict[Any, Tensor] = {}

    def find(self, name: str) -> Tensor:
        from helios.core.sharded_tensors import read_deferred

        deferred = self._folder.defer(name)
        is_deferred = name.startswith(self._prefixes)
        place = (is_deferred, self._folder.index.tensors[name].pieces or name)
        if place not in self._found:
            self._found[place] = deferred if is_deferred else read_deferred(deferred)
        return self._found[place]


class _NamedRows:
    """The rows of one tensor."""

    def __init__(self, reader: ShardReader, name: str) -> None:
        self._reader = reader
        self.name = name

    def __deepcopy__(self, memo: Any) -> _NamedRows:
        return self

    def read_rows(self, target: Tensor, first: int) -> None:
        self._reader.read_rows(self.name, target, first)


def open_contents(path: Path) -> Contents:
    """Return the contents of a checkpoint, by its name.

    Raises:
        CheckpointError: as :class:`ShardedFolder`.
        OSError: if the file system cannot read it.
    """
    return ShardedFolder(path) if file_names.is_folder(path) else WholeFile(path)


class ShardReader:
    """The sharded tensors of one checkpoint.

    Args:
        folder: the folder.
        index: its index.
    """

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.index = index
        self._folder = folder
        self._files: dict[int, _MappedFile] = {}

    def verify(self, share: RowShare | None, watch: Callable[[int], object] | None = None) -> None:
        """Compare bytes with their digests.

        Args:
            share: only what one process reads, and its share of the files' headers; ``None`` for
                every byte.
            watch: called with numbers of bytes that were compared, if every byte is.

        Raises:
            DamagedCheckpointError: if some differ.
            OSError: if the file system cannot read a file.
        """
        if share is None:
            for number, file in enumerate(self.index.files):
                mapped = self._open(number)
                for begin in range(0, file.size, BLOCK_BYTES):
                    end = min(begin + BLOCK_BYTES, file.size)
                    mapped.verify(begin, end)
                    if watch is not None:
                        watch(end - begin)
            return
        ends = [file.size for file in self.index.files]
        for name, tensor in self.index.tensors.items():
            size, count = _row_bytes(tensor), tensor.shape[0]
            rows = share.rows(count) if name.startswith(share.prefixes) else (0, count)
            for piece, _, begin, count in _cover(tensor, *rows):
                self._open(piece.file).verify(begin, begin + count * size)
            for piece in tensor.pieces:
                ends[piece.file] = min(ends[piece.file], piece.begin)
        for number, end in enumerate(ends):
            if number % share.num_processes == share.rank:
                self._open(number).verify(0, end)

    def read_rows(self, name: str, target: Tensor, first: int) -> None:
        """Fill a contiguous tensor on the CPU with rows of a tensor.

        Raises:
            DamagedCheckpointError: if they are not those that were written.
        """
        from helios.storage.shard_file import tensor_bytes

        tensor = self.index.tensors[name]
        rows = target.shape[0] if target.dim() else 1
        if not target.nbytes:
            return
        into, size = tensor_bytes(target), _row_bytes(tensor)
        for piece, row, begin, count in _cover(tensor, first, first + rows):
            at, length = (row - first) * size, count * size
            self._open(piece.file).copy(begin, into[at : at + length])

    def _open(self, number: int) -> _MappedFile:
        if number not in self._files:
            file = self.index.files[number]
            self._files[number] = _MappedFile(self._folder / file.name, file.size, file.digests)
        return self._files[number]


def _row_bytes(tensor: ShardedTensor) -> int:
    from helios.storage.shard_file import dtype_of

    return row_bytes(tensor, dtype_of(tensor.code).itemsize)


def _cover(tensor: ShardedTensor, first: int, end: int) -> Iterator[tuple[RowRange, int, int, int]]:
    """Yield what holds a range of rows: piece, its first row in it, where it begins, and rows."""
    size = _row_bytes(tensor)
    for piece in tensor.pieces:
        begin, stop = max(first, piece.first), min(end, piece.first + piece.rows)
        if begin < stop:
            yield piece, begin, piece.begin + (begin - piece.first) * size, stop - begin


class _MappedFile:
    """A file that is read in place."""

    def __init__(self, path: Path, size: int, digests: Any) -> None:
        self._path = path
        try:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise missing(path) from None
        except ValueError:
            # An empty file cannot be mapped.
            raise wrong_size(path, 0, size) from None
        if len(self._map) != size:
            raise wrong_size(path, len(self._map), size)
        self._view = memoryview(self._map)
        if digests and len(digests) != -(-size // BLOCK_BYTES):
            raise DamagedCheckpointError(f"{path} is damaged: its index lacks digests of blocks.")
        self._blocks = VerifiedBlocks(self._view, digests)

    def verify(self, begin: int, end: int) -> None:
        damaged = self._blocks.find_damaged(begin, end)
        if damaged is not None:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: the bytes from {damaged * BLOCK_BYTES} on do not match "
                "their digest in the index. Remove the checkpoint, or use another one."
            )

    def copy(self, begin: int, target: memoryview) -> None:
        end = begin + len(target)
        if end > len(self._view):
            raise DamagedCheckpointError(
                f"{self._path} is damaged: its index names bytes after its end. Remove the "
                "checkpoint, or use another one."
            )
        self.verify(begin, end)
        target[:] = self._view[begin:end]


def missing(path: Path) -> DamagedCheckpointError:
    """Return the error for a file of a sharded checkpoint that is not there."""
    return DamagedCheckpointError(
        f"{path.parent} is damaged: its file {path.name} is missing. Copy it back, or use another "
        "checkpoint."
    )


def wrong_size(path: Path, found: int, expected: int) -> DamagedCheckpointError:
    """Return the error for a file of a sharded checkpoint that is too short or too long."""
    return DamagedCheckpointError(
        f"{path} is damaged: it has {found} bytes instead of {expected}. Remove the checkpoint, or "
        "use another one."
    )

"""Reads rows of sharded tensors from the folder of a checkpoint, and verifies what it touches.

Files are mapped when they are first touched, so that a running training may delete the checkpoint
meanwhile.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.checkpoint.shard_index import RowRange, ShardedTensor, ShardIndex, row_bytes
from helios.errors import DamagedCheckpointError
from helios.storage.hashed_blocks import BLOCK_BYTES, VerifiedBlocks

if TYPE_CHECKING:
    from torch import Tensor

    from helios.core.sharded_tensors import RowShare


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

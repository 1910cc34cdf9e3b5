"""Computes SHA-256 digests of files, while writing them or from disk, and of each of their blocks.

With those of its blocks, a reader of some bytes of a file can verify these alone.

A digest is a string, ``sha256:`` and 64 hexadecimal digits, which leaves room for other algorithms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from helios.storage import files

_PREFIX = "sha256:"
_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 1 << 18


class DigestWriter:
    """A writable binary file that hashes what it passes on to another file.

    Small chunks are buffered here, not in the file, because a process forked in the meantime, such
    as a loader worker, would write its copy of the file's buffer.

    Args:
        handle: the unbuffered file to write to; it is not closed.
        hashes: whether to compute a digest.
    """

    def __init__(self, handle: BinaryIO, *, hashes: bool = True) -> None:
        self._handle = handle
        self._hash = hashlib.sha256() if hashes else None
        self._small = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash all of ``data``; returns the number of bytes."""
        size = memoryview(data).nbytes
        if size < _SMALL_BYTES:
            self._small += data
            if len(self._small) >= _CHUNK_BYTES:
                self.flush()
            return size
        self.flush()
        if self._hash is not None:
            self._hash.update(data)
        files.write(self._handle, data)
        return size

    def flush(self) -> None:
        """Write out the buffered chunks."""
        small, self._small = self._small, bytearray()
        if self._hash is not None:
            self._hash.update(small)
        files.write(self._handle, memoryview(small))

    def digest(self) -> str:
        """Return the digest of everything written so far; empty if ``hashes`` is False."""
        self.flush()
        return "" if self._hash is None else _PREFIX + self._hash.hexdigest()


def digest_file(path: Path, watch: Callable[[int], object] | None = None) -> str:
    """Return the digest of a file, read in chunks of 1 MiB.

    Args:
        path: the file.
        watch: called with the number of bytes of each chunk.

    Raises:
        OSError: if the file cannot be read.
    """
    result = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(chunk):
            result.update(chunk[:count])
            if watch is not None:
                watch(count)
    return _PREFIX + result.hexdigest()


BLOCK_BYTES = 1 << 18
_THREADS = 4
_MANY_BLOCKS = 16


class BlockHasher:
    """Hashes a file block by block while it is written.

    Attributes:
        digests: of the blocks that are complete, in hexadecimal digits.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._hash = hashlib.sha256()
        self._room = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Hash the next bytes."""
        while data:
            part, data = data[: self._room], data[self._room :]
            self._hash.update(part)
            self._room -= len(part)
            if not self._room:
                self._close()

    def _close(self) -> None:
        self.digests.append(self._hash.hexdigest())
        self._hash, self._room = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> list[str]:
        """Return the digests of all blocks; the last one may be short."""
        if self._room < BLOCK_BYTES:
            self._close()
        return self.digests


class VerifiedBlocks:
    """The blocks of a file that was written with their digests.

    Args:
        data: the bytes of the file, which may be mapped.
        digests: the digests of its blocks; none if there are none to compare with.
    """

    def __init__(self, data: Any, digests: Sequence[str]) -> None:
        self._data = data
        self._digests = digests
        self._verified: set[int] = set()

    def find_damaged(self, begin: int, end: int) -> int | None:
        """Return the first block that holds bytes of a range and is not as written, or ``None``.

        A block that was verified is not hashed again.
        """
        if not self._digests or begin >= end:
            return None
        blocks = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        unseen = [number for number in blocks if number not in self._verified]
        for number, is_good in zip(unseen, _map(self._is_good, unseen), strict=True):
            if not is_good:
                return number
            self._verified.add(number)
        return None

    def _is_good(self, number: int) -> bool:
        block = self._data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        return hashlib.sha256(block).hexdigest() == self._digests[number]


def _map(check: Callable[[int], bool], numbers: Sequence[int]) -> list[bool]:
    """Check numbers, many of them in threads: hashing a block does not hold the interpreter."""
    if len(numbers) < _MANY_BLOCKS:
        return [check(number) for number in numbers]
    with ThreadPoolExecutor(_THREADS, "helios-blocks") as pool:
        return list(pool.map(check, numbers))

"""Computes SHA-256 digests of files, while writing them or from disk.

A digest is a string, ``sha256:`` and 64 hexadecimal digits, which leaves room for other algorithms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

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


class FileFacts(NamedTuple):
    """What is known of a file that was written.

    Attributes:
        size: its size in bytes.
        digest: its digest; empty if none was computed.
    """

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path, *, hashes: bool) -> FileFacts:
        """Return the facts of a file."""
        return cls(path.stat().st_size, digest_file(path) if hashes else "")

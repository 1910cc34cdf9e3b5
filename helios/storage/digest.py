"""Computes SHA-256 digests of files, while writing them or from disk.

A digest is a string, ``sha256:`` and 64 hexadecimal digits, which leaves room for other algorithms.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from helios.storage import files

_PREFIX = "sha256:"
_CHUNK_BYTES = 1 << 20
# Passing a chunk to the other thread takes about 50 us, as long as hashing this many bytes.
_PARALLEL_BYTES = 1 << 18


class _Helper:
    """A thread that hashes one chunk at a time.

    The standard library's pools accept no work after the main thread has ended, while training in
    another thread may still be running.
    """

    def __init__(self, update: Callable[[bytes | memoryview], None]) -> None:
        self._update = update
        self._chunks: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, data: bytes | memoryview) -> None:
        """Start hashing a chunk; without a thread, it is hashed before this returns."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="helios-digest")
            try:
                thread.start()
            except RuntimeError:
                self._results.put(self._hash(data))
                return
            self._thread = thread
        self._chunks.put(data)

    def finish(self) -> None:
        """Wait until the chunk is hashed; raises the error of the hash, if any."""
        error = self._results.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (data := self._chunks.get()) is not None:
            result = self._hash(data)
            # The memory belongs to the caller again, so no reference may be kept.
            del data
            self._results.put(result)

    def _hash(self, data: bytes | memoryview) -> BaseException | None:
        try:
            self._update(data)
        except BaseException as error:
            return error
        return None


class DigestWriter:
    """A writable binary file that hashes what it passes on to another file.

    Large chunks are hashed in a second thread while they are written. The writer waits for both,
    because the memory of a chunk belongs to the caller again when ``write`` returns. Small chunks
    are buffered here, not in the file, because a process forked in the meantime, such as a loader
    worker, would write its copy of the file's buffer.

    Args:
        handle: the unbuffered file to write to; it is not closed.
        hashes: whether to compute a digest.
    """

    def __init__(self, handle: BinaryIO, *, hashes: bool = True) -> None:
        self._handle = handle
        self._hash = hashlib.sha256() if hashes else None
        self._small = bytearray()
        self._helper = None if self._hash is None else _Helper(self._hash.update)

    def __enter__(self) -> DigestWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._helper is not None:
            self._helper.close()

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash all of ``data``; returns the number of bytes."""
        size = memoryview(data).nbytes
        if size < _PARALLEL_BYTES:
            self._small += data
            if len(self._small) >= _CHUNK_BYTES:
                self.flush()
            return size
        self.flush()
        if self._helper is not None:
            self._helper.begin(data)
        try:
            files.write(self._handle, data)
        finally:
            if self._helper is not None:
                self._helper.finish()
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

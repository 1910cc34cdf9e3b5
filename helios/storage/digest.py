"""SHA-256 of files: while they are written, and when they are read again.

A digest is text, ``sha256:`` and 64 hexadecimal digits, so that another algorithm can follow.
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
# Handing a chunk to the other thread costs about 50 us, the hash of so many bytes.
_PARALLEL_BYTES = 1 << 18


class _Helper:
    """A thread that hashes one chunk after another; a chunk at a time is under way.

    A thread of its own, since the standard library's pools take no work once the main thread has
    ended, while a training in another one still goes on.
    """

    def __init__(self, update: Callable[[bytes | memoryview], None]) -> None:
        self._update = update
        self._chunks: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, data: bytes | memoryview) -> None:
        """Begin with a chunk; where no thread can be had, it is hashed when this returns."""
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
        """Return when the chunk is hashed; raises what came in between."""
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
            # Its memory is the caller's again; nothing here may hold on to it.
            del data
            self._results.put(result)

    def _hash(self, data: bytes | memoryview) -> BaseException | None:
        try:
            self._update(data)
        except BaseException as error:
            return error
        return None


class DigestWriter:
    """A writable binary file that hashes what passes through to another one.

    Large chunks are hashed in a second thread while they are written. The writer waits for both,
    because the memory behind a chunk is the caller's again once ``write`` returns. Small chunks
    are gathered here, not in the file: a process that is forked meanwhile, such as a loader worker,
    has a copy of them, and may write nothing of it.

    Args:
        handle: where the bytes go, without a buffer of its own; it stays open.
        hashes: whether a digest is wanted.
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
        """Write and hash all of ``data``; return the number of bytes."""
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
        """Pass on what was gathered."""
        small, self._small = self._small, bytearray()
        if self._hash is not None:
            self._hash.update(small)
        files.write(self._handle, memoryview(small))

    def digest(self) -> str:
        """Return the digest of everything written so far; empty where none is wanted."""
        self.flush()
        return "" if self._hash is None else _PREFIX + self._hash.hexdigest()


def digest_file(path: Path) -> str:
    """Return the digest of a file, read in chunks of 1 MiB.

    Raises:
        OSError: when the file cannot be read.
    """
    result = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(chunk):
            result.update(chunk[:count])
    return _PREFIX + result.hexdigest()

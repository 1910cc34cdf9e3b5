"""SHA-256 of files: while they are written, and when they are read again.

A digest is text, ``sha256:`` and 64 hexadecimal digits, so that another algorithm can follow.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from helios.core import files

_PREFIX = "sha256:"
_CHUNK_BYTES = 1 << 20
# Handing a chunk to the other thread costs about 50 us, the hash of so many bytes.
_PARALLEL_BYTES = 1 << 18


class DigestWriter:
    """A writable binary file that hashes what passes through to another one.

    Large chunks are hashed in a second thread while they are written. The writer waits for both,
    because the memory behind a chunk is the caller's again once ``write`` returns.

    Args:
        handle: where the bytes go; it stays open.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._hash = hashlib.sha256()
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="helios-digest")

    def __enter__(self) -> DigestWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._helper.shutdown()

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash all of ``data``; return the number of bytes."""
        if memoryview(data).nbytes < _PARALLEL_BYTES:
            self._hash.update(data)
            return files.write(self._handle, data)
        hashed = self._helper.submit(self._hash.update, data)
        try:
            return files.write(self._handle, data)
        finally:
            hashed.result()

    def flush(self) -> None:
        """Pass on what the underlying file has buffered."""
        self._handle.flush()

    def digest(self) -> str:
        """Return the digest of everything written so far."""
        return _PREFIX + self._hash.hexdigest()


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

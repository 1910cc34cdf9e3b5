"""The files of a run: paths that users give, durable operations, digests.

A write is durable if the bytes are on the disk before the name refers to them, and the name is on
the disk before the call returns. Callers use these functions through the module
(``files.replace(...)``), so that a test can kill a process before or after any of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from helios.errors import ArgumentError

TEMPORARY_SUFFIX = ".tmp"
_COPIED_AT_ONCE = 1 << 22

# Error codes of file systems that cannot fsync a folder (some network and user-space ones).
_NO_FOLDER_FSYNC = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


def temporary_path(path: Path) -> Path:
    """Return the temporary path that is renamed to ``path`` when it is complete."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def create(path: Path) -> BinaryIO:
    """Open a file for writing, and truncate it; the handle is a context manager.

    The file is unbuffered: when :func:`write` returns, the operating system has the data.
    """
    return cast("BinaryIO", path.open("wb", buffering=0))


def write(handle: BinaryIO, data: bytes | memoryview) -> int:
    """Write all of ``data``; returns the number of bytes."""
    rest = memoryview(data).cast("B")
    size = rest.nbytes
    while rest:
        # When the disk fills up, one call writes a part, and only the next one fails.
        rest = rest[handle.write(rest) :]
    return size


def fsync(handle: BinaryIO) -> None:
    """Wait until everything written to ``handle`` is on the disk."""
    handle.flush()
    os.fsync(handle.fileno())


def replace(source: Path, target: Path) -> None:
    """Rename a file atomically, replacing ``target`` if it exists."""
    source.replace(target)


def find_free(make: Callable[[int], Path]) -> Path:
    """Return the first path that does not exist, of those that are made of 1, 2, 3 ..."""
    return next(path for path in map(make, itertools.count(1)) if not path.exists())


def rename_aside(path: Path) -> Path:
    """Rename a file durably to ``<stem>.before-<n><suffix>``, and return the new path."""
    target = find_free(lambda n: path.with_name(f"{path.stem}.before-{n}{path.suffix}"))
    replace(path, target)
    fsync_folder(target.parent)
    return target


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    path.unlink(missing_ok=missing_ok)


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports that."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably; does nothing if it exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_folder(folder.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and the files in it; does nothing if there is none."""
    try:
        inside = sorted(path.iterdir())
    except FileNotFoundError:
        return
    for each in inside:
        if each.is_dir() and not each.is_symlink():
            remove_folder(each)
        else:
            unlink(each, missing_ok=True)
    remove_empty_folder(path)


def remove_empty_folder(path: Path) -> None:
    """Remove a folder that holds nothing."""
    path.rmdir()


def check_writable(path: Path) -> None:
    """Check that files can be created in a folder, or that the folder can be created.

    Raises:
        OSError: if they cannot. A full disk is not an error, because space may be freed later.
    """
    place = _find_present(path)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        if error.errno not in _FULL:
            error.filename = str(place)
            raise


def _find_present(path: Path) -> Path:
    """Return the first of a path and its parents that exists."""
    for place in (path, *path.parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which is renamed to ``path`` when the block ends.

    A crash leaves either the old or the new content if the block calls :func:`fsync` for what it
    writes. If the block fails, the temporary file is removed and the old file is kept.
    """
    partial = temporary_path(path)
    try:
        yield partial
        replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(partial, missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_text_durably(path: Path, text: str) -> None:
    """Write a small text file atomically: a crash leaves either the old or the new content."""
    with replacing(path) as partial, create(partial) as handle:
        write(handle, text.encode())
        fsync(handle)


def truncate(path: Path, size: int) -> None:
    """Truncate a file to ``size`` bytes durably."""
    with path.open("r+b") as handle:
        handle.truncate(size)
        fsync(handle)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file atomically: a crash leaves either no new file or the whole one."""
    with replacing(target) as partial, create(partial) as copied:
        with source.open("rb") as original:
            while data := original.read(_COPIED_AT_ONCE):
                write(copied, data)
        fsync(copied)


# ---- paths that users give


# Helios opens, locks and renames files, which no URL allows, and ``Path("s3://bucket")`` is a path
# to Python. One letter is a drive of Windows. A Path keeps one slash of two.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def as_local_path(name: str, value: str | Path) -> Path:
    """Return a path of the file system; ``file:///...`` is accepted.

    Args:
        name: the name of the argument, for the message.
        value: the path.

    Raises:
        ArgumentError: for any other URL.

    Example:
        >>> as_local_path("folder", "file:///data/my%20runs").as_posix()
        '/data/my runs'
    """
    text = value.as_posix() if isinstance(value, Path) else value
    if not _URL.match(text):
        return Path(value)
    url = urlsplit(text)
    if url.scheme == "file" and url.netloc in ("", "localhost"):
        return Path(url2pathname(url.path))
    raise ArgumentError(
        f"{name} must be a path of the file system, got the URL {text!r}. Mount it, or use a local "
        "folder and copy its files there and back between starts."
    )


# ---- digests


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
        write(self._handle, data)
        return size

    def flush(self) -> None:
        """Write out the buffered chunks."""
        small, self._small = self._small, bytearray()
        if self._hash is not None:
            self._hash.update(small)
        write(self._handle, memoryview(small))

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
    """The facts about a file that was written.

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

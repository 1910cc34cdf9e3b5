"""Every file operation of a save, each behind one name.

Durable means: the bytes are on the disk before the name points to them, and the name is on the
disk before the call returns. Callers reach these functions through the module
(``files.replace(...)``), so that a test can stop a process before or after any one of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

TEMPORARY_SUFFIX = ".tmp"

# What file systems answer that cannot fsync a folder (some network and user-space ones).
_NO_FOLDER_FSYNC = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


def temporary_path(path: Path) -> Path:
    """Return the name under which ``path`` is written before it is renamed."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, or empty an old one; the handle is a context manager.

    It has no buffer: what :func:`write` was given is the system's when it returns.
    """
    return cast("BinaryIO", path.open("wb", buffering=0))


def write(handle: BinaryIO, data: bytes | memoryview) -> int:
    """Write all of ``data`` and return the number of bytes."""
    rest = memoryview(data).cast("B")
    size = rest.nbytes
    while rest:
        # A disk that fills up takes a part first, and tells with the next call.
        rest = rest[handle.write(rest) :]
    return size


def fsync(handle: BinaryIO) -> None:
    """Return when everything written to ``handle`` is on the disk."""
    handle.flush()
    os.fsync(handle.fileno())


def replace(source: Path, target: Path) -> None:
    """Rename a file, in one instant, over whatever ``target`` was."""
    source.replace(target)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    path.unlink(missing_ok=missing_ok)


def fsync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk, as far as the system can say so."""
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
    """Create a folder and its missing parents, durably; an existing one is left alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_folder(folder.parent)


def check_writable(path: Path) -> None:
    """Try whether a folder takes new files, or can be created; nothing is left there.

    Raises:
        OSError: if it does not. A full disk is none of the reasons: room may be made.
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
    """Return the first of a path and its parents that is there."""
    for place in (path, *path.parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which takes the name ``path`` when the block ends.

    A crash leaves the old file or the new one, whole, if the block calls :func:`fsync` for what
    it writes. If the block fails, the temporary file is removed and the old one stays.
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
    """Write a small text file so that a crash leaves the old one or the new one, whole."""
    with replacing(path) as partial, create(partial) as handle:
        write(handle, text.encode())
        fsync(handle)


def truncate(path: Path, size: int) -> None:
    """Cut a file back to ``size`` bytes, durably."""
    with path.open("r+b") as handle:
        handle.truncate(size)
        fsync(handle)

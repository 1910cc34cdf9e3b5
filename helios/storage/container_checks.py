"""Checks the ZIP archive that a checkpoint is, without PyTorch and without creating an object."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from helios.errors import DamagedCheckpointError

_CHUNK_BYTES = 1 << 20
_FOLDER_FLAG = 0x10


def check_directory(path: Path) -> None:
    """Check the directory of a ZIP archive without reading its records.

    Raises:
        DamagedCheckpointError: if it is not a ZIP archive, or its records are not as torch writes
            them.
        OSError: if the file cannot be opened or read.
    """
    with _container(path) as container:
        for record in container.infolist():
            _check_form(record)


def check_container(
    path: Path, watch: Callable[[int], object] | None = None, *, part: tuple[int, int] | None = None
) -> None:
    """Verify the checksums of the records in a ZIP archive.

    This finds most damage if there is no digest, and keeps torch from reading damaged bytes.

    Args:
        path: the archive.
        watch: called with the number of bytes of each chunk that was read.
        part: where the archive begins in the file, and its length; ``None`` if it is all of it.

    Raises:
        DamagedCheckpointError: if it is not a ZIP archive, or a record is damaged.
        OSError: if the file cannot be opened or read.
    """
    with _container(path, part) as container:
        for record in container.infolist():
            _check_record(container, record, watch)


@contextlib.contextmanager
def _container(path: Path, part: tuple[int, int] | None = None) -> Iterator[zipfile.ZipFile]:
    try:
        with contextlib.ExitStack() as stack:
            opened: Any = path
            if part is not None:
                opened = stack.enter_context(io.BufferedReader(FilePart(path, *part)))
            yield stack.enter_context(zipfile.ZipFile(opened))
    except Exception as error:
        reraise_os_error(error)
        raise DamagedCheckpointError(
            f"{path} is not a complete archive: {reason_of(error)}. Remove it, or use another "
            "checkpoint."
        ) from error


def _check_form(record: zipfile.ZipInfo) -> None:
    # torch takes a record with this flag for a folder and leaves the tensor uninitialized.
    if record.external_attr & _FOLDER_FLAG or record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"the record {record.filename} is not as torch writes them")


def _check_record(
    container: zipfile.ZipFile, record: zipfile.ZipInfo, watch: Callable[[int], object] | None
) -> None:
    _check_form(record)
    # torch.serialization.set_crc32_options(False) leaves the checksums at zero.
    if not record.CRC:
        return
    with container.open(record) as handle:
        while data := handle.read(_CHUNK_BYTES):
            if watch is not None:
                watch(len(data))


def reraise_os_error(error: Exception) -> None:
    """Raise an error of the file system again; return for any other one."""
    # A failing disk is not a damaged file. A position read from damaged bytes leads to EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error; torch's full text suggests ``weights_only=False``."""
    if "TorchScript" in str(error):
        return "it is a TorchScript archive, which is code"
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")


@final
class FilePart(io.RawIOBase):
    """A part of a file; to be read through ``io.BufferedReader``, which closes it.

    Args:
        path: the file.
        offset: where the part begins in it.
        length: its number of bytes.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset, self._length, self._place = offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}
        self._place = bases[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read from the present place on."""
        rest = max(0, self._length - self._place)
        self._file.seek(self._offset + self._place)
        count = self._file.readinto(memoryview(buffer)[:rest]) or 0
        self._place += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

"""Checks the ZIP archive that a checkpoint is, without PyTorch and without creating an object.

Older versions of PyTorch trust the number of elements in a file's pickle. A number that is too high
then exposes memory that is not part of the file, or exhausts the memory, so it is compared with the
records.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, final

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
    path: Path,
    watch: Callable[[int], object] | None = None,
    *,
    part: tuple[int, int] | None = None,
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
            _check_form(record)
            # torch.serialization.set_crc32_options(False) leaves the checksums at zero.
            if not record.CRC:
                continue
            with container.open(record) as handle:
                while data := handle.read(_CHUNK_BYTES):
                    if watch is not None:
                        watch(len(data))


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
    is_folder = record.external_attr & _FOLDER_FLAG
    # torch allocates what the directory says, whatever is stored.
    is_stored = record.compress_type == zipfile.ZIP_STORED and (
        record.compress_size == record.file_size
    )
    if is_folder or not is_stored:
        raise zipfile.BadZipFile(f"the record {record.filename} is not as torch writes them")


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


_LITERALS = {"BINUNICODE", "GLOBAL", "BININT", "BININT1", "BININT2", "LONG1"}
_GETS = {"BINGET", "LONG_BINGET"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
# Types without a storage class of their own are written as untyped storages.
_ELEMENT_BYTES = {
    "torch.storage UntypedStorage": 1,
    **dict.fromkeys(("torch ComplexDoubleStorage",), 16),
    **dict.fromkeys(("torch DoubleStorage", "torch LongStorage", "torch ComplexFloatStorage"), 8),
    **dict.fromkeys(("torch FloatStorage", "torch IntStorage", "torch QInt32Storage"), 4),
    **dict.fromkeys(("torch HalfStorage", "torch BFloat16Storage", "torch ShortStorage"), 2),
    **dict.fromkeys(("torch ByteStorage", "torch CharStorage", "torch BoolStorage"), 1),
    **dict.fromkeys(("torch QInt8Storage", "torch QUInt8Storage"), 1),
    **dict.fromkeys(("torch QUInt4x2Storage", "torch QUInt2x4Storage"), 1),
}


def check_sizes(handle: IO[bytes]) -> None:
    """Compare the sizes that the pickle of a ZIP archive states with those of its records.

    The opcodes of the pickle are only read; no object is created.

    Args:
        handle: the open archive.

    Raises:
        ValueError: if a record does not have the stated size, or if the pickle refers to records
            in a way that torch does not write.
        zipfile.BadZipFile: if it is not a ZIP archive.
    """
    with zipfile.ZipFile(handle) as container:
        root = container.namelist()[0].split("/")[0]
        # torch ignores case in names, so of two such records it may read the other one.
        records = {record.filename.casefold(): record for record in container.infolist()}
        if len(records) < len(container.infolist()):
            raise ValueError("several of its records have the same name")
        for key, num_bytes in _find_promises(_read(container, f"{root}/data.pkl")):
            record = records.get(f"{root}/data/{key}".casefold())
            found = 0 if record is None else record.file_size
            if found != num_bytes:
                raise ValueError(f"the record {key} has {found} bytes instead of {num_bytes}")


def _read(container: zipfile.ZipFile, name: str) -> bytes:
    record = container.getinfo(name)
    if not record.CRC:
        # torch.serialization.set_crc32_options(False) leaves the checksums at zero.
        del record.CRC
    with container.open(record) as handle:
        return handle.read()


def _find_promises(data: bytes) -> list[tuple[str, int]]:
    """Return the key and the size of each record, once per reference in the pickle.

    torch writes a reference as a tuple of five literals, possibly from the memo; any other form is
    rejected.
    """
    found = []
    memo: dict[Any, Any] = {}
    top: Any = None
    members: list[Any] | None = None
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in _PUTS:
            memo[argument] = top
        elif name in _LITERALS or name in _GETS:
            top = argument if name in _LITERALS else memo.get(argument)
            if members is not None:
                members.append(top)
        elif name == "BINPERSID":
            match top:
                case ("storage", str(kind), str(key), str(), int(count)) if kind in _ELEMENT_BYTES:
                    found.append((key, count * _ELEMENT_BYTES[kind]))
                case _:
                    raise ValueError("it refers to a record in a way that torch does not write")
            top = members = None
        else:
            top = tuple(members) if name == "TUPLE" and members is not None else None
            members = [] if name == "MARK" else None
    return found


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

"""The only place that calls ``torch.save`` and ``torch.load``.

What is written can always be loaded by ``weights_only``, which executes nothing from a file: a
value for which that does not hold is named when it is saved, and not when it is missed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from helios.core.tagged import Decoder, Encoder
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError

_CHUNK_BYTES = 1 << 20
_FOLDER_FLAG = 0x10
# How torch begins the RuntimeError that it raises in place of a MemoryError.
_ALLOCATOR = "DefaultCPUAllocator"


class Writable(Protocol):
    """What :func:`write` writes to; bytes come in order, nothing is sought."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of ``data``."""
        ...

    def flush(self) -> None:
        """Pass on what is buffered."""
        ...


def encode(tree: Any, *, where: str, safe_types: Iterable[Any] = ()) -> Any:
    """Return a tree that ``weights_only`` loading accepts (USERS.md 10).

    NumPy arrays and scalars, the standard library's containers, paths, dates and times, byte
    strings and complex numbers become tagged dictionaries. Enum members, named tuples and other
    objects need their type in ``safe_types``. Tensors are detached and share memory with the live
    ones: copy them before training goes on if the tree is written later. What occurs twice in the
    tree, or shares a storage in it, does so again after decoding; so encode a payload in one call.

    Args:
        tree: the value.
        where: what its root is called in messages, as ``"model"`` in ``model.history[3]``.
        safe_types: what ``Model.types_for_safe_load`` names.

    Raises:
        StateError: for a value that could not be loaded again: the path to it, its type and what
            can be done.
    """
    types = list(safe_types)
    return Encoder(where, types, lambda value: _try_loading(value, types)).encode(tree)


def decode(tree: Any, *, safe_types: Iterable[Any] = ()) -> Any:
    """Return the tree that :func:`encode` was given; :func:`read` has done so already."""
    return Decoder(safe_types).decode(tree)


def write(handle: Writable, tree: Any) -> None:
    """Write an encoded tree, front to back.

    Raises:
        OSError: what the handle raised; torch would hide it behind an error of its own.
    """
    try:
        torch.save(tree, cast("IO[bytes]", handle))
    except RuntimeError as error:
        raise _find_cause(error) from error


def read(path: Path, safe_types: Iterable[Any] = ()) -> Any:
    """Read and decode a file; its tensors lie on the CPU (H24, H26).

    Args:
        path: the file.
        safe_types: types that may be built besides tensors and plain values.

    Raises:
        DamagedCheckpointError: if the file is no readable container of a tree.
        IncompatibleCheckpointError: if it refers to a type or function that is not allowed. That
            is never imported or called.
        MemoryError: if its tensors do not fit into the memory.
        OSError: if the file system does not give the file.
    """
    types = list(safe_types)
    try:
        with path.open("rb"), _allowing(types):
            tree = torch.load(path, map_location="cpu", weights_only=True)
        return decode(tree, safe_types=types)
    except Exception as error:
        _reraise_os_error(error)
        if isinstance(error, MemoryError) or _ALLOCATOR in str(error):
            raise MemoryError(f"There is too little memory to load {path}.") from error
        names = unsafe_globals(path, types)
        if names:
            raise IncompatibleCheckpointError(
                f"{path} was not loaded: it refers to {', '.join(names)}, and loading builds "
                "nothing that is not allowed by name. If you trust the file and these are types "
                "of yours, return them from the model's types_for_safe_load()."
            ) from error
        raise DamagedCheckpointError(
            f"{path} cannot be read: {_reason(error)}. Remove it, or take another checkpoint."
        ) from error


def unsafe_globals(path: Path, safe_types: Iterable[Any] = ()) -> list[str]:
    """Return the names of what a file refers to and loading would refuse; none if unreadable."""
    with _allowing(safe_types):
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        except Exception:
            return []


def check_container(path: Path) -> None:
    """Compare the records of a file with the check sums that its container holds.

    This finds most damage where no digest is at hand, and keeps broken bytes from torch's reader.

    Raises:
        DamagedCheckpointError: if it is no container, or a record is not what was written.
        OSError: if the file system does not give the file.
    """
    try:
        with zipfile.ZipFile(path) as container:
            for record in container.infolist():
                _check_record(container, record)
    except Exception as error:
        _reraise_os_error(error)
        raise DamagedCheckpointError(
            f"{path} is no whole container: {_reason(error)}. Remove it, or take another "
            "checkpoint."
        ) from error


def _check_record(container: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    # torch takes a record with this flag for a folder, and leaves the tensor's memory as it is.
    if record.external_attr & _FOLDER_FLAG or record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"the record {record.filename} is not as torch writes them")
    # torch.serialization.set_crc32_options(False) leaves the sums at zero.
    if not record.CRC:
        return
    with container.open(record) as handle:
        while handle.read(_CHUNK_BYTES):
            pass


@contextlib.contextmanager
def _allowing(safe_types: Iterable[Any]) -> Iterator[None]:
    # torch's block would also forget, at its end, what the user had registered before it.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([kind for kind in safe_types if kind not in known]):
        yield


def _try_loading(value: Any, safe_types: list[Any]) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    with _allowing(safe_types):
        try:
            torch.load(buffer, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(_reason(error)) from error


def _find_cause(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _reraise_os_error(error: Exception) -> None:
    # A disk that fails is not a damaged file. A position read from broken bytes ends in EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error; torch's own text advises to switch safety off."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")

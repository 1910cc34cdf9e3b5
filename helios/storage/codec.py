"""The only place that calls ``torch.save`` and ``torch.load``.

What is written can always be loaded by ``weights_only``, which executes nothing from a file: a
value for which that does not hold is named when it is saved, and not when it is missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from helios.core.gc_pause import collector_at_rest
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.protocols import Meter
from helios.storage import archive_records, files
from helios.storage.digest import DigestWriter
from helios.storage.placeholders import stand_in
from helios.storage.staging import HostBuffers
from helios.storage.user_types import type_name
from helios.storage.weights_only import Decoder, Encoder

_CHUNK_BYTES = 1 << 20
_FOLDER_FLAG = 0x10
_ZIP_BEGINS = b"PK\x03\x04"
# Said of loads that are as they should be: advice to run what torch takes for a script, and news
# that it checks sparse tensors.
_SCRIPT_WARNING = "'torch.load' received a zip file that looks like a TorchScript archive"
_SPARSE_WARNING = "Validating sparse tensor invariants"
# How torch begins the RuntimeError that it raises in place of a MemoryError.
_ALLOCATOR = "DefaultCPUAllocator"
# How torch's writer replaces whatever was raised while it wrote.
_WRITER = "unexpected pos"


class Writable(Protocol):
    """What :func:`write` writes to; bytes come in order, nothing is sought."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of ``data``."""
        ...

    def flush(self) -> None:
        """Pass on what is buffered."""
        ...


def encode(
    tree: Any,
    *,
    where: str,
    safe_types: Iterable[Any] = (),
    meters: Mapping[int, Meter] | None = None,
) -> Any:
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
        meters: count how long parts of the tree take, by address.

    Raises:
        StateError: for a value that could not be loaded again: the path to it, its type and what
            can be done.
    """
    types = list(safe_types)
    with collector_at_rest():
        return Encoder(where, types, lambda value: _try_loading(value, types), meters).encode(tree)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A tree that was encoded to be written later.

    Attributes:
        code: the encoded tree, as :func:`encode` returns it.
        is_own: whether nothing in it changes when the training goes on.
    """

    code: Any
    is_own: bool


def capture(
    tree: Any,
    *,
    safe_types: Iterable[Any],
    buffers: HostBuffers,
    meters: Mapping[int, Meter] | None = None,
) -> Captured:
    """Encode a tree, and copy its tensors into memory of its own (USERS.md 21).

    Objects of the user's, beside enum members and tuples, are not copied: nobody knows how. With
    one of them in the tree the result is not its own.

    Args:
        tree: the value.
        safe_types: what ``Model.types_for_safe_load`` names.
        buffers: takes the copies; those of the last capture are given up.
        meters: as for :func:`encode`.

    Raises:
        StateError: as :func:`encode`.
        MemoryError: if there is too little memory for the copies.
    """
    types = list(safe_types)
    encoder = Encoder("", types, lambda value: _try_loading(value, types), meters)
    with collector_at_rest():
        code = encoder.encode(tree)
    if encoder.has_live_objects:
        return Captured(code, is_own=False)
    buffers.copy(encoder.groups)
    return Captured(code, is_own=True)


def decode(tree: Any, *, safe_types: Iterable[Any] = ()) -> Any:
    """Return the tree that :func:`encode` was given; :func:`read` has done so already."""
    return Decoder(safe_types).decode(tree)


def write(handle: Writable, tree: Any) -> None:
    """Write an encoded tree, front to back.

    Raises:
        BaseException: what the handle raised, whatever it is; torch would hide it behind an error
            of its own.
    """
    try:
        torch.save(tree, cast("IO[bytes]", handle))
    except RuntimeError as error:
        cause = _find_cause(error)
        if cause is error:
            raise
        raise cause from error


def write_file(path: Path, tree: Any, *, hashes: bool = False) -> str:
    """Write an encoded tree into a file, and return when its bytes are on the disk.

    Args:
        path: the file; an old one is emptied first.
        tree: what :func:`encode` returned.
        hashes: whether to compute the digest while writing.

    Returns:
        The digest of the file; empty without ``hashes``.
    """
    with files.create(path) as handle, DigestWriter(handle, hashes=hashes) as writer:
        write(writer, tree)
        digest = writer.digest()
        files.fsync(handle)
    return digest


def read(path: Path, safe_types: Iterable[Any] = (), *, maps: bool = False) -> Any:
    """Read and decode a file; its tensors lie on the CPU (H24, H26).

    Args:
        path: the file.
        safe_types: types that may be built besides tensors and plain values.
        maps: whether tensors may lie in the file itself, mapped: for a reader who copies what it
            keeps, of a file that nobody changes in place.

    Raises:
        DamagedCheckpointError: if the file is no readable container of a tree.
        IncompatibleCheckpointError: if it refers to a type or function that is not allowed. That
            is never imported or called.
        MemoryError: if its tensors do not fit into the memory.
        OSError: if the file system does not give the file.
    """
    types = list(safe_types)
    try:
        with path.open("rb") as handle, _loading(types):
            # torch's older formats promise sizes that nothing in the file has to keep.
            if handle.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
                raise zipfile.BadZipFile("it is no container")
            archive_records.check_sizes(handle)
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
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


def read_structure(path: Path) -> tuple[Any, list[str]]:
    """Return the encoded tree of a file, whose tensors are mapped and not read, and what it needs.

    Every object of a class that loading would refuse is an ``placeholders.Unknown``.

    Args:
        path: the file.

    Returns:
        The tree as it was written, not decoded; and the names of those classes and functions.

    Raises:
        DamagedCheckpointError: if the file is no readable container of a tree.
        IncompatibleCheckpointError: if it refers to what may not even be named.
        MemoryError: if its objects do not fit into the memory.
        OSError: if the file system does not give the file.
    """
    check_directory(path)
    with contextlib.suppress(Exception):
        return _map(path, ()), []
    names = unsafe_globals(path)
    try:
        return _map(path, [(stand_in(name), name) for name in names]), names
    except Exception as error:
        _reraise_os_error(error)
        if isinstance(error, MemoryError) or _ALLOCATOR in str(error):
            raise MemoryError(f"There is too little memory to look into {path}.") from error
        if names:
            raise IncompatibleCheckpointError(
                f"{path} refers to {', '.join(names)}, and cannot be looked into: "
                f"{_reason(error)}. Do not load it unless you know who wrote it."
            ) from error
        raise DamagedCheckpointError(
            f"{path} cannot be read: {_reason(error)}. Remove it, or take another checkpoint."
        ) from error


def _map(path: Path, safe_types: Iterable[Any]) -> Any:
    with path.open("rb"), _loading(safe_types):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def check_directory(path: Path) -> None:
    """Check what a container says of its records, without reading them.

    Raises:
        DamagedCheckpointError: if it is no container, or its records are not as torch writes them.
        OSError: if the file system does not give the file.
    """
    with _container(path) as container:
        for record in container.infolist():
            _check_form(record)


def check_container(path: Path) -> None:
    """Compare the records of a file with the check sums that its container holds.

    This finds most damage where no digest is at hand, and keeps broken bytes from torch's reader.

    Raises:
        DamagedCheckpointError: if it is no container, or a record is not what was written.
        OSError: if the file system does not give the file.
    """
    with _container(path) as container:
        for record in container.infolist():
            _check_record(container, record)


@contextlib.contextmanager
def _container(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as container:
            yield container
    except Exception as error:
        _reraise_os_error(error)
        raise DamagedCheckpointError(
            f"{path} is no whole container: {_reason(error)}. Remove it, or take another "
            "checkpoint."
        ) from error


def _check_form(record: zipfile.ZipInfo) -> None:
    # torch takes a record with this flag for a folder, and leaves the tensor's memory as it is.
    if record.external_attr & _FOLDER_FLAG or record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"the record {record.filename} is not as torch writes them")


def _check_record(container: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    _check_form(record)
    # torch.serialization.set_crc32_options(False) leaves the sums at zero.
    if not record.CRC:
        return
    with container.open(record) as handle:
        while handle.read(_CHUNK_BYTES):
            pass


@contextlib.contextmanager
def hiding(names: Collection[str]) -> Iterator[list[Any]]:
    """Take back, for a block, what a user has allowed to be built under some names.

    A file of another package may be looked into then: :func:`read_structure` puts an inert object
    in the place of each of them, whatever the process has registered.

    Args:
        names: full names, as files have them.

    Yields:
        What the user has allowed besides.
    """
    known = torch.serialization.get_safe_globals()
    left = [kind for kind in known if _global_name(kind) not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(left)
    try:
        yield left
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def _global_name(kind: Any) -> str:
    return str(kind[1]) if isinstance(kind, tuple) else type_name(kind)


@contextlib.contextmanager
def _allowing(safe_types: Iterable[Any]) -> Iterator[None]:
    # torch's block would also forget, at its end, what the user had registered before it.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([kind for kind in safe_types if kind not in known]):
        yield


@contextlib.contextmanager
def _loading(safe_types: Iterable[Any]) -> Iterator[None]:
    with _allowing(safe_types), warnings.catch_warnings():
        for text in (_SCRIPT_WARNING, _SPARSE_WARNING):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield


def _try_loading(value: Any, safe_types: list[Any]) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    with _loading(safe_types):
        try:
            torch.load(buffer, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(_reason(error)) from error


def _find_cause(error: BaseException) -> BaseException:
    while _WRITER in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def _reraise_os_error(error: Exception) -> None:
    # A disk that fails is not a damaged file. A position read from broken bytes ends in EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error; torch's own text advises to switch safety off."""
    if "TorchScript" in str(error):
        return "it is a TorchScript archive, which is code"
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")

"""Writes and reads trees of values; the only module that calls ``torch.save`` and ``torch.load``.

Everything written can be loaded with ``weights_only=True``, which executes no code from a file. A
value for which that is not possible raises an error when it is saved, not when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from helios.core.utils import collector_at_rest
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError, StateError
from helios.storage import files
from helios.storage.codes import TOO_DEEP, Unsavable
from helios.storage.container_checks import (
    check_directory,
    check_sizes,
    reason_of,
    reraise_os_error,
)
from helios.storage.digest import DigestWriter
from helios.storage.payload_codes import (
    FindSharded,
    PayloadBuilder,
    PayloadCoder,
    compact,
    fill_sharded,
)
from helios.storage.placeholders import stand_in
from helios.storage.staging import HostBuffers
from helios.storage.type_converters import names_of_global

_ZIP_BEGINS = b"PK\x03\x04"
# Warnings that torch emits for valid loads: the first one takes the file for a TorchScript archive,
# the second one says that sparse tensors are checked.
_SCRIPT_WARNING = "'torch.load' received a zip file that looks like a TorchScript archive"
_SPARSE_WARNING = "Validating sparse tensor invariants"
# Part of the RuntimeError that torch raises instead of a MemoryError.
_ALLOCATOR = "DefaultCPUAllocator"
# Part of the RuntimeError that torch's writer raises in place of an error of the file.
_WRITER = "unexpected pos"


class Writable(Protocol):
    """A file that :func:`write_encoded` writes to sequentially, without seeking."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of ``data``."""
        ...

    def flush(self) -> None:
        """Flush what is buffered."""
        ...


def encode(
    tree: Any,
    *,
    where: str,
    safe_types: Iterable[Any] = (),
) -> Any:
    """Return a tree that ``weights_only`` loading accepts.

    NumPy arrays and scalars, the standard library's containers, paths, dates and times, byte
    strings and complex numbers become tagged dictionaries. Enum members, named tuples and other
    objects need their type in ``safe_types``. Tensors are detached and share memory with the live
    ones: if the tree is written later, copy them before training continues. Objects that occur
    twice and tensors that share a storage do so again after decoding, within one call.

    Args:
        tree: the value.
        where: name of its root in messages, such as ``"model"`` in ``model.history[3]``.
        safe_types: the types that ``Model.types_for_safe_load`` returns.

    Raises:
        StateError: if a value could not be loaded again; the message has the path to it, its type
            and a remedy.
    """
    coder, code = _encode(tree, where, safe_types)
    compact(chain.from_iterable(coder.tensors.values()))
    return code


def _encode(tree: Any, where: str, safe_types: Iterable[Any]) -> tuple[PayloadCoder, Any]:
    types = list(safe_types)
    coder = PayloadCoder(types, lambda value: _try_loading(value, types))
    try:
        with collector_at_rest():
            return coder, coder.encode(tree)
    except Unsavable as error:
        place = f"{where}{error.path}".removeprefix(".")
        raise StateError(f"{place} cannot be saved: {error.reason}") from error
    except RecursionError:
        raise StateError(
            f"{where} cannot be saved: {TOO_DEEP}, or name the attribute in `unsaved`."
        ) from None


@dataclasses.dataclass(frozen=True)
class Captured:
    """An encoded tree that is written later.

    Attributes:
        code: the encoded tree, as :func:`encode` returns it.
        is_own: whether it stays unchanged while training continues.
    """

    code: Any
    is_own: bool


def encode_to_host(
    tree: Any,
    *,
    safe_types: Iterable[Any],
    buffers: HostBuffers,
) -> Captured:
    """Encode a tree, and copy its tensors to host memory.

    Objects of users' types, except enum members and tuples, are not copied; if the tree contains
    one, ``is_own`` of the result is False.

    Args:
        tree: the value.
        safe_types: the types that ``Model.types_for_safe_load`` returns.
        buffers: hold the copies; those of the previous capture become invalid.

    Raises:
        StateError: as :func:`encode`.
        MemoryError: if there is not enough memory for the copies.
    """
    coder, code = _encode(tree, "", safe_types)
    groups = compact(chain.from_iterable(coder.tensors.values()))
    if not coder.has_live_objects:
        buffers.copy(groups)
    return Captured(code, is_own=not coder.has_live_objects)


def decode(
    tree: Any, *, safe_types: Iterable[Any] = (), find_sharded: FindSharded | None = None
) -> Any:
    """Return the tree that :func:`encode` was called with; :func:`read` does so itself."""
    return PayloadBuilder(safe_types, find_sharded).build("", tree)


def write_encoded(handle: Writable, tree: Any) -> None:
    """Write an encoded tree sequentially.

    Raises:
        BaseException: the error that the handle raised, which torch would replace with its own.
    """
    try:
        torch.save(tree, cast("IO[bytes]", handle))
    except RuntimeError as error:
        cause = find_cause(error)
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
    with files.create(path) as handle:
        writer = DigestWriter(handle, hashes=hashes)
        write_encoded(writer, tree)
        digest = writer.digest()
        files.fsync(handle)
    return digest


def read(
    path: Path,
    safe_types: Iterable[Any] = (),
    *,
    maps: bool = False,
    find_sharded: FindSharded | None = None,
) -> Any:
    """Read and decode a file; its tensors are on the CPU.

    Args:
        path: the file.
        safe_types: types that may be created besides tensors and plain values.
        maps: whether to map tensors into memory instead of reading them. The file must not be
            modified in place while they are used.
        find_sharded: returns the tensor that stands for a sharded one, by name.

    Raises:
        DamagedCheckpointError: if the file is not a readable archive.
        IncompatibleCheckpointError: if it refers to a type or function that is not allowed; that
            is never imported or called.
        MemoryError: if its tensors do not fit into memory.
        OSError: if the file cannot be opened or read.
    """
    types = list(safe_types)
    try:
        with path.open("rb") as handle, _loading(types):
            # In torch's older formats, sizes cannot be checked against the contents.
            if handle.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
                raise zipfile.BadZipFile("it is not a ZIP archive")
            check_sizes(handle)
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
        return decode(tree, safe_types=types, find_sharded=find_sharded)
    except Exception as error:
        reraise_os_error(error)
        if isinstance(error, DamagedCheckpointError):
            raise
        if isinstance(error, MemoryError) or _ALLOCATOR in str(error):
            raise MemoryError(f"There is not enough memory to load {path}.") from error
        names = unsafe_globals(path, types)
        if names:
            raise IncompatibleCheckpointError(
                f"{path} was not loaded: it refers to {', '.join(names)}, and loading creates only "
                "allowed types. If you trust the file and these are your own types, return them "
                "from the model's types_for_safe_load()."
            ) from error
        raise DamagedCheckpointError(
            f"{path} cannot be read: {reason_of(error)}. Remove it, or use another checkpoint."
        ) from error


def unsafe_globals(path: Path, safe_types: Iterable[Any] = ()) -> list[str]:
    """Return the names in a file that loading would reject; empty if it is unreadable."""
    with _allowing(safe_types):
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        except Exception:
            return []


def read_structure(path: Path, find_sharded: FindSharded | None = None) -> tuple[Any, list[str]]:
    """Return the encoded tree of a file with mapped tensors, without creating users' objects.

    Each object of a class that loading would reject is a ``placeholders.Unknown``.

    Args:
        path: the file.
        find_sharded: returns the tensor that stands for a sharded one, by name.

    Returns:
        The tree as written, not decoded; and the names of the rejected classes and functions.

    Raises:
        DamagedCheckpointError: if the file is not a readable archive.
        IncompatibleCheckpointError: if torch blocks a name that the file refers to.
        MemoryError: if its objects do not fit into memory.
        OSError: if the file cannot be opened or read.
    """
    tree, names = _read_structure(path)
    return (tree if find_sharded is None else fill_sharded(tree, find_sharded)), names


def _read_structure(path: Path) -> tuple[Any, list[str]]:
    check_directory(path)
    with contextlib.suppress(Exception):
        return _map(path, ()), []
    names = unsafe_globals(path)
    try:
        return _map(path, [(stand_in(name), name) for name in names]), names
    except Exception as error:
        reraise_os_error(error)
        if isinstance(error, MemoryError) or _ALLOCATOR in str(error):
            raise MemoryError(f"There is not enough memory to inspect {path}.") from error
        if names:
            raise IncompatibleCheckpointError(
                f"{path} refers to {', '.join(names)} and cannot be inspected: {reason_of(error)}. "
                "Do not load it unless you know who wrote it."
            ) from error
        raise DamagedCheckpointError(
            f"{path} cannot be read: {reason_of(error)}. Remove it, or use another checkpoint."
        ) from error


def _map(path: Path, safe_types: Iterable[Any]) -> Any:
    with path.open("rb"), _loading(safe_types):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@contextlib.contextmanager
def hiding(names: Collection[str]) -> Iterator[list[Any]]:
    """Remove names from torch's safe globals for a block.

    In the block, :func:`read_structure` puts a placeholder in the place of each object of these
    classes, whatever the process has registered.

    Args:
        names: full names, as files contain them.

    Yields:
        The remaining safe globals.
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
    return str(kind[1]) if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}"


@contextlib.contextmanager
def _allowing(safe_types: Iterable[Any]) -> Iterator[None]:
    # At its end, torch's context manager also removes types that the user registered before.
    known = torch.serialization.get_safe_globals()
    named = [each for kind in safe_types for each in (kind, *_other_names(kind))]
    with torch.serialization.safe_globals([each for each in named if each not in known]):
        yield


def _other_names(kind: Any) -> list[tuple[Any, str]]:
    """Return a type with each name that it has in another process of the run."""
    if not isinstance(kind, type):
        return []
    return [(kind, name) for name in names_of_global(kind) if name != _global_name(kind)]


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
            raise TypeError(reason_of(error)) from error


def find_cause(error: BaseException) -> BaseException:
    """Return the error of a file in whose place torch's writer has raised its own."""
    while _WRITER in str(error) and error.__context__ is not None:
        error = error.__context__
    return error

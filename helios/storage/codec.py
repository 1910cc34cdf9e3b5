"""Writes and reads trees of values; the only module that calls ``torch.save`` and ``torch.load``.

Everything written can be loaded with ``weights_only=True``, which executes no code from a file. A
value for which that is not possible raises an error when it is saved, not when it is loaded.
"""

from __future__ import annotations

import contextlib
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import is_
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from helios.core.generators import is_generator
from helios.core.memory import has_plain_bytes
from helios.core.plain_values import qualified_name
from helios.core.utils import collector_at_rest
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError, StateError
from helios.storage import files
from helios.storage.building import Builder, UnknownTypeError
from helios.storage.codes import NO_VALUE, TAG, TOO_DEEP, Coder, Codes, Unsavable
from helios.storage.container_checks import (
    check_directory,
    check_sizes,
    reason_of,
    reraise_os_error,
)
from helios.storage.files import DigestWriter
from helios.storage.memory_layout import place_views
from helios.storage.staging import HostBuffers, compact
from helios.storage.type_converters import ShardedValue

_ZIP_BEGINS = b"PK\x03\x04"
# Warnings that torch emits for valid loads: the first one takes the file for a TorchScript archive,
# the second one says that sparse tensors are checked.
_SCRIPT_WARNING = "'torch.load' received a zip file that looks like a TorchScript archive"
_SPARSE_WARNING = "Validating sparse tensor invariants"
# Part of the RuntimeError that torch raises instead of a MemoryError.
_ALLOCATOR = "DefaultCPUAllocator"
# Part of the RuntimeError that torch's writer raises in place of an error of the file.
_WRITER = "unexpected pos"


def encode(
    tree: Any, *, where: str, safe_types: Iterable[Any] = (), buffers: HostBuffers | None = None
) -> Any:
    """Return a tree that ``weights_only`` loading accepts.

    NumPy arrays and scalars, the standard library's containers, paths, dates and times, byte
    strings and complex numbers become tagged dictionaries. Enum members, named tuples and other
    objects need their type in ``safe_types``. Tensors are detached and, without buffers, share
    memory with the live ones. Objects that occur
    twice and tensors that share a storage do so again after decoding, within one call.

    Args:
        tree: the value.
        where: name of its root in messages, such as ``"model"`` in ``model.history[3]``.
        safe_types: the types that ``Model.types_for_safe_load`` returns.
        buffers: hold copies of the tensors; those of the previous call become invalid.

    Raises:
        MemoryError: if there is not enough memory for the copies.
        StateError: if a value could not be loaded again; the message has the path to it, its type
            and a remedy.
    """
    coder = PayloadCoder(safe_types)
    try:
        with collector_at_rest():
            code = coder.code("", tree)
            place_views(coder)
    except Unsavable as error:
        place = f"{where}{error.path}".removeprefix(".")
        raise StateError(f"{place} cannot be saved: {error.reason}") from error
    except RecursionError:
        raise StateError(
            f"{where} cannot be saved: {TOO_DEEP}, or name the attribute in `unsaved`."
        ) from None
    groups = compact(chain.from_iterable(coder.tensors.values()))
    if buffers is not None:
        buffers.copy(groups)
    return code


def write_encoded(handle: BinaryIO | DigestWriter, tree: Any) -> None:
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
    try:
        with path.open("rb") as handle, _loading():
            # torch would also read its older formats, which no checkpoint has.
            if handle.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
                raise zipfile.BadZipFile("it is not a ZIP archive")
            check_sizes(handle)
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
        builder = Builder(safe_types, find_sharded=find_sharded or ShardedValue)
        return builder.build("", tree)
    except Exception as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        if isinstance(error, UnknownTypeError):
            raise IncompatibleCheckpointError(f"{path} was not loaded. {error}") from error
        raise _unreadable(path, error) from error


def unsafe_globals(path: Path) -> list[str]:
    """Return the names in a file that loading would reject; empty if it is unreadable."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:
        return []


def read_structure(path: Path, find_sharded: FindSharded | None = None) -> tuple[Any, list[str]]:
    """Return the encoded tree of a file with mapped tensors, without creating users' objects.

    Each object of a class that loading would reject is an :class:`Unknown`.

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
    check_directory(path)
    names: list[str] | None = None
    with contextlib.suppress(Exception):
        tree, names = _map(path, ()), []
    if names is None:
        names = unsafe_globals(path)
        try:
            tree = _map(path, [(stand_in(name), name) for name in names])
        except Exception as error:
            raise _unreadable(path, error) from error
    return (tree if find_sharded is None else fill_sharded(tree, find_sharded)), names


def _unreadable(path: Path, error: Exception) -> Exception:
    """Return the error of a file that cannot be loaded; one of the file system is raised again."""
    reraise_os_error(error)
    if isinstance(error, MemoryError) or _ALLOCATOR in str(error):
        return MemoryError(f"There is not enough memory to load {path}.")
    if names := unsafe_globals(path):
        return IncompatibleCheckpointError(
            f"{path} was not loaded: it refers to {', '.join(names)}, which no checkpoint "
            "does. None of it was called; do not load the file unless you know who wrote it."
        )
    return DamagedCheckpointError(
        f"{path} cannot be read: {reason_of(error)}. Remove it, or use another checkpoint."
    )


def _map(path: Path, stand_ins: Iterable[Any]) -> Any:
    # At its end, torch's context manager also removes types that the user registered before.
    known = torch.serialization.get_safe_globals()
    own = torch.serialization.safe_globals([each for each in stand_ins if each not in known])
    with path.open("rb"), own, _loading():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@contextlib.contextmanager
def hiding(names: Collection[str]) -> Iterator[list[Any]]:
    """Remove names from torch's safe globals for a block.

    In the block, :func:`read_structure` replaces each object of these classes by a placeholder,
    regardless of registered globals.

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
def _loading() -> Iterator[None]:
    with warnings.catch_warnings():
        for text in (_SCRIPT_WARNING, _SPARSE_WARNING):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield


def find_cause(error: BaseException) -> BaseException:
    """Return the error of a file that torch's writer has replaced by its own."""
    while _WRITER in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


# ---- objects of a file whose classes are not loaded


class Unknown:
    """An object of a file whose class is unknown or not trusted.

    Attributes:
        name: the full name of its class or function in the file.
        parts: its arguments, and its state if it has one.
    """

    name = ""
    parts: tuple[Any, ...] = ()

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.parts = (*self.parts, state)

    def __repr__(self) -> str:
        return f"{self.name}(...)"


def stand_in(name: str) -> type[Unknown]:
    """Return a placeholder class for a name that a file refers to.

    Example:
        >>> stand_in("datetime.date")(2024, 2, 29).parts
        (2024, 2, 29)
    """
    return type("Unknown", (Unknown,), {"name": name})


# ---- codes of a payload

FindSharded: TypeAlias = Callable[[str], Any]

_SHARDED = "sharded"


class PayloadCoder(Coder):
    """One walk over a payload.

    Args:
        safe_types: users' types that loading may create.
    """

    def __init__(self, safe_types: Iterable[Any]) -> None:
        super().__init__()
        self._safe = frozenset(kind for kind in safe_types if isinstance(kind, type))
        # The tensor is kept with its code, since an id is unique only while the object exists.
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def code_other(self, path: str, value: Any) -> Any:
        """Return the code of what a walk has written, or of a value of a user's type."""
        kind = type(value)
        if kind is Codes:
            self.tensors[path] = value.tensors
            return {TAG: "codes", "value": dict(value)}
        if kind is ShardedValue:
            return {TAG: _SHARDED, "name": value.name}
        if kind is torch.nn.Parameter:
            return self._plain_tensor(path, value)
        if kind is not int and kind not in self._safe and not is_generator(value):
            raise Unsavable(
                path,
                f"{NO_VALUE.format(qualified_name(kind))}. Add the type to the model's "
                "types_for_safe_load(), name the attribute in `unsaved`, or give its owner a "
                "state_dict of plain values.",
            )
        return super().code_other(path, value)

    def _plain_tensor(self, path: str, value: Tensor) -> Tensor:
        if id(value) in self._tensors:
            return self._tensors[id(value)][1]
        code = value.detach()
        is_dense = has_plain_bytes(code)
        if not is_dense or code.is_conj() or code.is_neg():
            # The storage alone does not define its values.
            code = code.clone()
        if type(value) is Tensor and value.is_leaf:
            code.requires_grad_(value.requires_grad)
        self._tensors[id(value)] = value, code
        if is_dense:
            self.tensors[path] = [code]
        return code

    makers: ClassVar = {**Coder.makers, Tensor: _plain_tensor}


def fill_sharded(code: Any, find_sharded: FindSharded) -> Any:
    """Put the tensors that stand for sharded ones into a code, in place, without decoding it.

    Args:
        code: what an encoder or anybody else has made.
        find_sharded: returns such a tensor, by name.
    """
    waiting: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, dict) and value.get(TAG) == _SHARDED:
            return find_sharded(str(value.get("name")))
        if type(value) is tuple:
            members = tuple(map(visit, value))
            return value if all(map(is_, members, value)) else members
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            waiting.append(value)
        return value

    code = visit(code)
    while waiting:
        holder = waiting.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            holder[key] = visit(holder[key])
    return code

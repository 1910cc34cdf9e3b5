"""Describes values by tokens, which a digest of them compares: types, order, bytes.

What a value refers to is described by its subclasses: by name in a graph of what an owner reaches,
by number in a content that is compared by itself.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator, state_of_generator
from helios.core.memory import has_plain_bytes
from helios.core.sharded_tensors import is_sharded
from helios.state_graph.values import (
    ATOMS,
    CONTAINERS,
    OUTSIDE,
    SCALARS,
    Identities,
    are_atoms,
    attributes_of,
    comes_from,
    is_plain_object,
    is_single,
)
from helios.storage.checksums import array_sum, tensor_sum

# The token before those of a part. No atom is a bytearray, so nothing else looks like it.
REF, AGAIN, TUPLE, ARRAY, TENSOR, SCALAR, MEMBER, OPAQUE, OBJECT, BROKEN = (
    bytearray([code]) for code in range(10)
)
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""What is compared by identity: it is made when modules are imported, and never changes."""

MAX_DEPTH = 100
"""Maximum depth of tuples in tuples, which are read recursively."""

_SHORT_BYTES = 1 << 10
_LONG_WRITE = 1 << 14


class _Sink:
    """A file that keeps the hash and the size of what is written to it."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)
        self.size = 0

    def write(self, data: bytes) -> int:
        size = len(data)
        self.size += size
        self.hash.update(data if size < _LONG_WRITE else b"%d %d" % (size, zlib.crc32(data)))
        return size


def digest_of(tokens: list[Any]) -> tuple[bytes, int]:
    """Return a hash of tokens, and the size of their pickle."""
    sink = _Sink()
    pickler = pickle.Pickler(sink, protocol=5)
    # Without pickle's memo, equal atoms have equal bytes whether they are one object or two.
    pickler.fast = True
    pickler.dump(tokens)
    return sink.hash.digest(), sink.size


class TooDeepError(Exception):
    """A value is nested too deeply to be read."""


class Scanner:
    """Appends the tokens of values. Subclasses add those of what has an identity."""

    def __init__(self) -> None:
        self._depth = 0

    def scan(self, value: Any, tokens: list[Any]) -> None:
        """Append what describes a value."""
        kind = type(value)
        if kind in ATOMS:
            tokens.append(value)
        elif kind is tuple:
            self._scan_tuple(value, tokens)
        elif kind is np.ndarray:
            self._scan_array(value, tokens)
        elif kind in CONTAINERS:
            self.scan_container(value, tokens)
        elif kind in SCALARS:
            tokens += (SCALAR, value.dtype.str, value.tobytes())
        elif isinstance(value, Enum):
            self.scan_member(value, tokens)
        elif is_single(value):
            tokens.append(value)
        else:
            self.scan_object(value, tokens)

    def scan_container(self, part: Any, tokens: list[Any]) -> None:
        """Append what describes a list, dict, set or deque."""
        raise NotImplementedError

    def scan_object(self, part: Any, tokens: list[Any]) -> None:
        """Append what describes anything else that has an identity, also a tensor."""
        raise NotImplementedError

    def add_view(self, part: Any, tokens: list[Any]) -> bool:
        """Note a tensor or array; return whether its content is described elsewhere."""
        raise NotImplementedError

    def scan_member(self, part: Enum, tokens: list[Any]) -> None:
        """Append what describes a member of an enum."""
        tokens += (MEMBER, type(part).__qualname__, repr(part))

    def name_key(self, key: Any) -> Any:
        """Return what stands for the key of a dict in paths."""
        return key

    def scan_members(self, members: Iterable[tuple[Any, Any]], tokens: list[Any]) -> None:
        """Append what describes members, each after the key that leads to it."""
        if self._depth >= MAX_DEPTH:
            raise TooDeepError
        self._depth += 1
        try:
            for key, member in members:
                kind = type(member)
                if kind in ATOMS:
                    tokens.append(member)
                elif kind in SCALARS:
                    tokens += (SCALAR, member.dtype.str, member.tobytes())
                elif kind is np.ndarray and not member.dtype.hasobject:
                    self._scan_elements(member, tokens)
                else:
                    self.scan_at(key, member, tokens)
        finally:
            self._depth -= 1

    def scan_at(self, key: Any, member: Any, tokens: list[Any]) -> None:
        """Append what describes a member with a key."""
        self.scan(member, tokens)

    def describe(self, part: Any, tokens: list[Any]) -> None:
        """Append the content of a container."""
        kind = type(part)
        tokens += (kind.__name__, len(part))
        if kind is deque:
            tokens.append(part.maxlen)
        if kind is defaultdict:
            factory = part.default_factory
            tokens.append(getattr(factory, "__qualname__", None) or repr(factory))
        if not isinstance(part, dict):
            if are_atoms(part):
                tokens.append(list(part))
            else:
                self.scan_members(enumerate(part), tokens)
            return
        if are_atoms(part) and are_atoms(part.values()):
            tokens.append(dict(part))
            return
        if are_atoms(part):
            tokens.append(list(part))
        else:
            keys = ((f"<key {number}>", key) for number, key in enumerate(part))
            self.scan_members(keys, tokens)
        self.scan_members(((self.name_key(key), part[key]) for key in part), tokens)

    def _scan_tuple(self, value: tuple[Any, ...], tokens: list[Any]) -> None:
        if are_atoms(value):
            tokens.append(value)
            return
        tokens += (TUPLE, len(value))
        self.scan_members(enumerate(value), tokens)

    def _scan_array(self, part: np.ndarray[Any, Any], tokens: list[Any]) -> None:
        if part.dtype == object:
            tokens += (ARRAY, part.shape)
            self.scan_members(enumerate(part.reshape(-1).tolist()), tokens)
        elif part.dtype.hasobject:
            self.scan_object(part, tokens)
        else:
            self._scan_elements(part, tokens)

    def _scan_elements(self, part: np.ndarray[Any, Any], tokens: list[Any]) -> None:
        if not self.add_view(part, tokens):
            flags, dtype = part.flags, part.dtype
            tokens += (ARRAY, dtype.char if dtype.names is None else repr(dtype), part.shape)
            tokens += (() if flags.c_contiguous else part.strides, flags.writeable)
            is_short = part.nbytes < _SHORT_BYTES
            tokens.append(part.tobytes() if is_short else array_sum(part))

    def scan_tensor(self, part: Tensor, tokens: list[Any]) -> None:
        """Append what describes a dense tensor."""
        if not self.add_view(part, tokens):
            tokens += (TENSOR, str(part.dtype), tuple(part.shape), part.stride(), part.device.type)
            tokens += (part.requires_grad, part.is_leaf, type(part).__qualname__, tensor_sum(part))


def is_dense(part: Tensor) -> bool:
    """Return whether the elements of a tensor can be read as bytes in this process."""
    return has_plain_bytes(part) and not is_sharded(part) and not is_lazy(part)


@final
class ContentScanner(Scanner):
    """Compares a value by its content alone; what occurs twice in it counts as such.

    Objects are taken apart as pickle would; one that refuses is compared by identity.

    Args:
        identities: numbers for what is compared by identity.
        name_of: returns the name of an object that is saved elsewhere, by its id.
    """

    def __init__(
        self, identities: Identities, name_of: Callable[[int], str | None] = lambda number: None
    ) -> None:
        super().__init__()
        self._identities = identities
        self._name_of = name_of
        self._seen: dict[int, int] = {}
        # Temporary objects must live as long as their ids are remembered.
        self._made: list[Any] = []

    def mark(self, value: Any) -> bytes:
        """Return a mark that is equal for equal content, on whichever device its tensors are."""
        tokens: list[Any] = []
        try:
            self.scan(value, tokens)
            return digest_of(tokens)[0]
        except Exception as error:  # user code, called while an object is taken apart
            return b"%s %d" % (type(error).__name__.encode(), self._identities.number(value))

    def _is_again(self, part: Any, tokens: list[Any]) -> bool:
        number = self._seen.get(id(part))
        if number is None:
            self._seen[id(part)] = len(self._seen)
            self._made.append(part)
            return False
        tokens += (AGAIN, number)
        return True

    def scan_container(self, part: Any, tokens: list[Any]) -> None:
        """Append the content, unless the container was there before."""
        if type(part) is frozenset or not self._is_again(part, tokens):
            self.describe(part, tokens)

    def add_view(self, part: Any, tokens: list[Any]) -> bool:
        """Return whether the tensor or array was there before."""
        return self._is_again(part, tokens)

    def scan_object(self, part: Any, tokens: list[Any]) -> None:
        """Append the name of what is saved elsewhere, and the content of anything else."""
        name = self._name_of(id(part))
        if name is not None:
            tokens += (REF, name)
        elif self._is_again(part, tokens):
            return
        elif isinstance(part, Tensor):
            self._scan_any_tensor(part, tokens)
        elif is_generator(part):
            self.scan(state_of_generator(part), tokens)
        elif is_plain_object(type(part)):
            tokens += (OBJECT, type(part).__qualname__)
            self.scan_members(attributes_of(part).items(), tokens)
        else:
            self._reduce(part, tokens)

    def _scan_any_tensor(self, part: Tensor, tokens: list[Any]) -> None:
        if is_dense(part):
            # It has just been noted.
            del self._seen[id(part)]
            self.scan_tensor(part, tokens)
            return
        tokens += (OPAQUE, str(part.dtype), tuple(part.shape))
        if part.layout is torch.sparse_coo:
            inside = part.detach()
            tokens += (tensor_sum(inside._indices()), tensor_sum(inside._values()))  # noqa: SLF001
        else:
            version = 0 if part.is_inference() else part._version  # noqa: SLF001
            tokens += (self._identities.number(part), version)

    def _reduce(self, part: Any, tokens: list[Any]) -> None:
        tokens += (OPAQUE, type(part).__qualname__)
        if isinstance(part, (*CODE, MethodType, Dataset, DataLoader)):
            tokens.append(self._identities.number(part))
        elif isinstance(part, io.IOBase):
            is_open = not part.closed and part.seekable()
            tokens += (self._identities.number(part), part.closed, is_open and part.tell())
        elif isinstance(part, np.memmap):
            # A read-only file cannot have changed, and may be too large to read.
            tokens += (self._identities.number(part), part.shape)
            tokens.append(array_sum(part) if part.flags.writeable else 0)
        else:
            self._scan_reduced(part, tokens)

    def _scan_reduced(self, part: Any, tokens: list[Any]) -> None:
        reduced = _reduced(part)
        if reduced is None:
            tokens.append(self._identities.number(part))
            if type(part) is memoryview and not part.readonly:
                tokens.append(zlib.crc32(part.tobytes()))
        else:
            # Members come from iterators, which this loop would exhaust.
            whole = [*reduced[:3], *(list(piece) for piece in reduced[3:5] if piece is not None)]
            self.scan_members(enumerate(whole), tokens)
        if not comes_from(type(part), OUTSIDE):
            # What a class tells pickle may leave some out.
            self.scan_members(attributes_of(part).items(), tokens)


def _reduced(part: Any) -> tuple[Any, ...] | None:
    """Return what pickle would take an object apart into; ``None`` if it refuses."""
    if type(part) in weakref.ProxyTypes:
        # It would be what it refers to that is taken apart.
        return None
    try:
        reducer = copyreg.dispatch_table.get(type(part))
        reduced = part.__reduce_ex__(5) if reducer is None else reducer(part)
    except Exception:  # user code
        return None
    return reduced if isinstance(reduced, tuple) else None


def is_iterator(value: object) -> bool:
    """Return whether a value is an iterator, whose position is unknown."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def mark_of_state(state: Any, identities: Identities) -> bytes:
    """Return a mark that is equal for equal content, on whichever device its tensors are."""
    return ContentScanner(identities).mark(state)

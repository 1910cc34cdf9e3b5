"""A fingerprint of nested values, such as a batch: 64 bits over types, names, shapes and elements.

It is the same in every process, and on every machine of the same byte order. Nothing is pickled:
what is neither a tensor, an array, a plain value nor a container of these is counted as unseen, and
only the name of its class enters the fingerprint. The entries of a dictionary have no order. A
sharded tensor is read as the whole one, by all processes together.
"""

from __future__ import annotations

import contextlib
import struct
from collections import UserDict
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from helios.core.sharded_tensors import whole_of
from helios.storage.checksums import array_sum, tensor_sum

_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_ARRAYS = (np.ndarray, np.generic)
_FLAT = frozenset((list, tuple, dict))
_TENSOR, _TEXT = {Tensor}, {str}
_MOST_NESTED = 100
_MANY = 16
_NUMBER = struct.Struct("<Q")
_MAX_NUMBER = (1 << 64) - 1


class Fingerprint(NamedTuple):
    """What was seen of a value.

    Attributes:
        value: 64 bits.
        num_unseen: parts whose content could not be read.
    """

    value: int
    num_unseen: int = 0


class Content(NamedTuple):
    """What was read of a value, so that the value may change before it is hashed.

    Attributes:
        data: the bytes to hash; or the kind of a container of tensors, a list of names for a
            dictionary, with type, shape and checksum of each tensor.
        num_unseen: parts whose content could not be read.
        failure: why nothing could be read; empty if something was.
    """

    data: bytes | tuple[str | list[str], list[tuple[torch.dtype, torch.Size, int]]]
    num_unseen: int = 0
    failure: str = ""


def look(value: Any) -> Content:
    """Read a value now; :func:`hash_content` hashes it later, and costs most for small tensors."""
    kind = type(value)
    if kind in _FLAT:
        is_named = kind is dict
        members = value.values() if is_named else value
        # One pass for what most batches are.
        if {*map(type, members)} == _TENSOR and not (is_named and {*map(type, value)} != _TEXT):
            try:
                found = [(each.dtype, each.shape, crc32(each.numpy())) for each in members]
                return Content(([*value] if is_named else kind.__name__, found))
            except (TypeError, RuntimeError, ValueError, BufferError):
                pass
    reader = _Reader()
    return Content(reader.read(value), reader.num_unseen)


def look_safely(value: Any) -> Content:
    """Read a value now, as :func:`look`; one that fails counts as unseen."""
    try:
        return look(value)
    except Exception as error:
        # A tensor of a user's class may fail here; that is no reason to stop.
        return Content(b"", 1, f"{type(error).__name__}: {error}")


def content_bytes(content: Content) -> bytes:
    """Return the bytes to hash."""
    data = content.data
    if isinstance(data, bytes):
        return data
    kind, leaves = data
    parts = [_token_of_form(dtype, shape) + _NUMBER.pack(sum_) for dtype, shape, sum_ in leaves]
    if isinstance(kind, list):
        names = [_token(f"str {name!r}") for name in kind]
        parts = sorted(name + part for name, part in zip(names, parts, strict=True))
        kind = "mapping"
    return _token_of_kind(kind, len(parts)) + _digest_of(parts)


def hash_content(content: Content, *salt: int) -> int:
    """Return 64 bits over what was read of a value; zero if nothing could be read.

    Args:
        content: what was read.
        salt: numbers that enter, too, so that equal values in different places differ.
    """
    return 0 if content.failure else hash_bytes(content_bytes(content), *salt)


def fingerprint(value: Any, *salt: int) -> Fingerprint:
    """Return the fingerprint of a value.

    Args:
        value: tensors, arrays, plain values, and containers of these.
        salt: as in :func:`hash_content`.
    """
    content = look(value)
    return Fingerprint(hash_content(content, *salt), content.num_unseen)


def pack_indices(indices: Any) -> bytes:
    """Return the indices of the samples of a batch, of any type, in order, for a hash.

    Args:
        indices: a list of them; a single one if batches are not collated.
    """
    numbers = indices if isinstance(indices, list) else [indices]
    try:
        return _struct_of(len(numbers)).pack(*numbers)
    except (struct.error, TypeError):
        return _Reader().read(indices)


def hash_bytes(data: bytes, *salt: int) -> int:
    """Return 64 bits over bytes.

    Args:
        data: the bytes.
        salt: as in :func:`hash_content`.
    """
    return int.from_bytes(blake2b(_head_of(*salt) + data, digest_size=8).digest(), "little")


@lru_cache(maxsize=64)
def _struct_of(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


@lru_cache(maxsize=1024)
def _head_of(*salt: int) -> bytes:
    return _struct_of(len(salt)).pack(*salt)


def _digest_of(parts: list[bytes]) -> bytes:
    return blake2b(b"".join(parts), digest_size=8).digest()


def _token(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


@lru_cache(maxsize=64)
def _token_of_kind(kind: str, count: int) -> bytes:
    return _token(f"{kind} {count}")


@lru_cache(maxsize=256)
def _token_of_form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return _token(f"{dtype} {tuple(shape)}")


@final
class _Reader:
    """Turns values into bytes: for each one a token of its type, and its content or a hash of it.

    A container is hashed on its own and once, even if it occurs many times.
    """

    def __init__(self) -> None:
        self.num_unseen = 0
        self._depth = 0
        # By address; the containers are kept, so that no address is used again.
        self._known: dict[int, tuple[bytes, object]] = {}

    def read(self, value: Any) -> bytes:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._read_tensor(value)
        if isinstance(value, _ARRAYS):
            return self._read_array(value)
        if kind is bytes:
            return _token(f"bytes {len(value)}") + blake2b(value, digest_size=8).digest()
        if kind in _ATOMS:
            return _token(f"{kind.__name__} {value!r}")
        if id(value) in self._known:
            return self._known[id(value)][0]
        if self._depth == _MOST_NESTED:
            return self._name_unseen(value)
        # A container inside of itself.
        self._known[id(value)] = b"again", value
        self._depth += 1
        found = self._read_members(value)
        self._depth -= 1
        self._known[id(value)] = found, value
        return found

    def _read_members(self, value: Any) -> bytes:
        if isinstance(value, dict | UserDict):
            items = value.data if isinstance(value, UserDict) else value
            parts = sorted(self.read(key) + self.read(each) for key, each in dict.items(items))
            text = f"mapping {len(parts)}"
        elif isinstance(value, tuple):
            parts = self._read_sequence(list(tuple.__iter__(value)))
            text = f"tuple {tuple.__len__(value)}"
        elif isinstance(value, list):
            parts = self._read_sequence(list(list.__iter__(value)))
            text = f"list {list.__len__(value)}"
        elif is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value)]
            parts = [self.read(getattr(value, name, None)) for name in names]
            text = f"{type(value).__qualname__} {names}"
        else:
            return self._name_unseen(value)
        return _token(text) + _digest_of(parts)

    def _read_sequence(self, members: list[Any]) -> list[bytes]:
        if len(members) > _MANY and all(type(member) is int for member in members):
            with contextlib.suppress(struct.error):  # a number of more than 64 bits
                return [_struct_of(len(members)).pack(*members)]
        return [
            self._read_tensor(member) if type(member) is Tensor else self.read(member)
            for member in members
        ]

    def _read_tensor(self, tensor: Tensor) -> bytes:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._name_unseen(tensor)
        number = _NUMBER.pack(tensor_sum(whole_of(tensor)) & _MAX_NUMBER)
        return _token_of_form(tensor.dtype, tensor.shape) + number

    def _read_array(self, array: Any) -> bytes:
        if array.dtype.hasobject or isinstance(array, np.ma.MaskedArray):
            return self._name_unseen(array)
        number = _NUMBER.pack(array_sum(np.asarray(array)))
        return _token(f"{array.dtype.str} {array.shape}") + number

    def _name_unseen(self, value: object) -> bytes:
        self.num_unseen += 1
        return _token(f"unseen {type(value).__qualname__}")

"""Hashes of values in memory: fingerprints of nested values, and checksums of the bits of tensors.

A fingerprint of a batch is 64 bits over types, names, shapes and elements. It is the same in every
process, and on every machine of the same byte order. Nothing is pickled: of anything but tensors,
arrays, plain values and containers of these, only the name of the class enters, and it counts as
unseen. The entries of a dictionary have no order. A sharded tensor is read in full, by all
processes together.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import zlib
from array import array
from collections import UserDict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter, mul
from typing import Any, NamedTuple, TypeAlias, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from helios.core.sharded_tensors import local_of, whole_of

_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_ARRAYS = (np.ndarray, np.generic)
_FLAT = frozenset((list, tuple, dict))
_TENSOR, _TEXT = {Tensor}, {str}
_MOST_NESTED = 100
_MANY = 16
_NUMBER = struct.Struct("<Q")
_MAX_NUMBER = (1 << 64) - 1
_Form: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
_form_of = attrgetter("dtype", "shape")
Sums: TypeAlias = tuple["str | tuple[str, ...]", tuple[_Form, ...], list[int]]
"""What was read of a container of tensors: the arguments of :func:`weigh`."""


class Content(NamedTuple):
    """The content that was read of a value.

    Attributes:
        fingerprint: 64 bits; 0 if nothing could be read.
        num_unseen: parts whose content could not be read.
        failure: why nothing could be read; empty if something was.
    """

    fingerprint: int
    num_unseen: int = 0
    failure: str = ""


def read_sums(value: Any) -> Content | Sums:
    """Read a batch whose fingerprint is needed later only; one that fails counts as unseen.

    Returns:
        Checksums, for :func:`weigh`, where that is enough, as for most batches; else the content.
    """
    kind = type(value)
    if kind not in _FLAT or not value:
        return read_safely(value)
    is_named = kind is dict
    members = value.values() if is_named else value
    for member in members:
        if type(member) is not Tensor:
            return read_safely(value)
    if is_named and {*map(type, value)} != _TEXT:
        return read_safely(value)
    forms, sums = [], []
    try:
        for tensor in members:
            if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
                return read_safely(value)
            form = tensor.dtype, tensor.shape
            memory, address = _memory_of(form), tensor.data_ptr()
            if memory is None or not address:
                return read_safely(value)
            forms.append(form)
            sums.append(crc32(memory.from_address(address)))
    except Exception:  # such as of a layout without memory of its own
        return read_safely(value)
    return (tuple(value) if is_named else kind.__name__), tuple(forms), sums


@lru_cache(maxsize=1024)
def _memory_of(form: _Form) -> Any:
    """Return the type of a tensor's memory; ``None`` for elements that it does not show as is."""
    empty = torch.empty(0, dtype=form[0], device="cpu")
    if empty.is_quantized or empty.is_complex():
        return None
    return ctypes.c_char * (math.prod(form[1]) * empty.itemsize)


def weigh(names: str | tuple[str, ...], forms: tuple[_Form, ...], sums: Sequence[int]) -> int:
    """Return the fingerprint of a container of tensors.

    Args:
        names: those of a dictionary, or the type of the container.
        forms: type and shape of each tensor.
        sums: the checksum of each.
    """
    base, factors = _weights_of(names, forms)
    total: int = base + sum(map(mul, sums, factors))
    return total & _MAX_NUMBER


def read_content(value: Any) -> Content:
    """Read a value.

    Args:
        value: tensors, arrays, plain values, and containers of these.
    """
    kind = type(value)
    is_named = kind is dict
    members = [*(value.values() if is_named else value)] if kind in _FLAT else []
    is_flat = {*map(type, members)} == _TENSOR and all(map(_has_elements, members))
    if is_flat and not (is_named and {*map(type, value)} != _TEXT):
        names = tuple(value) if is_named else kind.__name__
        sums = [tensor_sum(each) & _MAX_NUMBER for each in members]
        return Content(weigh(names, tuple(map(_form_of, members)), sums))
    reader = _Reader()
    return Content(hash_bytes(reader.read(value)), reader.num_unseen)


def read_safely(value: Any) -> Content:
    """Read a value; one that fails counts as unseen."""
    try:
        return read_content(value)
    except Exception as error:
        # A tensor of a user's class may fail here; that is no reason to stop.
        return Content(0, 1, failure=f"{type(error).__name__}: {error}")


def fingerprint(value: Any) -> int:
    """Return 64 bits over a value."""
    return read_content(value).fingerprint


def fingerprint_indices(indices: Any) -> int:
    """Return 64 bits over the indices of the samples of a batch, of any type, in order.

    Args:
        indices: a list of them; a single one if batches are not collated.
    """
    numbers = indices if isinstance(indices, list) else [indices]
    try:
        digest = blake2b(array("q", numbers), digest_size=8).digest()
    except (TypeError, OverflowError):
        return hash_bytes(_Reader().read(indices))
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=1024)
def factor_of(replica: int) -> int:
    """Return the odd number of 64 bits that hashes of a replica are multiplied with.

    So equal batches of different replicas count differently, and sums over replicas can be added.
    """
    return hash_bytes(_NUMBER.pack(replica)) | 1


def hash_bytes(data: bytes) -> int:
    """Return 64 bits over bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _has_elements(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


@lru_cache(maxsize=1024)
def _weights_of(names: str | tuple[str, ...], forms: tuple[_Form, ...]) -> tuple[int, list[int]]:
    """Return 64 bits over the form of a container of tensors, and a factor for each checksum.

    The order of the names of a dictionary does not matter.
    """
    parts = []
    for number, (dtype, shape) in enumerate(forms):
        name = str(number) if isinstance(names, str) else f"str {names[number]!r}"
        parts.append(_token(name) + _token_of_form(dtype, shape))
    text = names if isinstance(names, str) else "mapping"
    return hash_bytes(_token(text) + b"".join(sorted(parts))), [hash_bytes(x) | 1 for x in parts]


def _token(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


@lru_cache(maxsize=256)
def _token_of_form(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return _token(f"{dtype} {tuple(shape)}")


@final
class _Reader:
    """Writes values as bytes: for each one a token of its type, and its content or a hash of it.

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
        return _token(text) + blake2b(b"".join(parts), digest_size=8).digest()

    def _read_sequence(self, members: list[Any]) -> list[bytes]:
        if len(members) > _MANY and all(type(member) is int for member in members):
            with contextlib.suppress(OverflowError):  # a number of more than 64 bits
                return [array("q", members).tobytes()]
        return [
            self._read_tensor(member) if type(member) is Tensor else self.read(member)
            for member in members
        ]

    def _read_tensor(self, tensor: Tensor) -> bytes:
        if not _has_elements(tensor):
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


# ---- checksums of bits, which show changes at less cost than a digest

# For 200 MB blake2b takes 0.31 s, ``zlib.crc32`` 0.07 s. Weighted sums of 64-bit words are three
# times faster still, but miss that the signs of two float64 numbers flip together. A cyclic
# redundancy check detects every change within 32 bits, and of any others, such as exchanged
# elements or flipped signs, all but one in four billion.

_MAX_COPIED = 1 << 16
_WORDS = 1 << 22


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, on its device; fast, but not a digest."""
    flat = local_of(tensor.detach()).reshape(-1).contiguous()
    if flat.numel() == 0 or flat.dtype is torch.bool:
        return flat.sum(dtype=torch.int64)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(width.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)


def array_sum(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of the elements of an array without objects, in order."""
    whole = np.ascontiguousarray(array)
    return zlib.crc32(whole.reshape(-1).view(np.uint8).data)


def tensor_sum(tensor: Tensor) -> int:
    """Return a checksum of a dense tensor's elements; a large one is read on its device."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.is_cpu and (flat.data_ptr() or not flat.numel()):
        # NumPy would borrow the memory, and torch resizes no memory that is lent.
        return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    flat = flat.reshape(-1).view(torch.uint8)
    if flat.numel() <= _MAX_COPIED:
        return zlib.crc32(flat.cpu().numpy().data)
    return weighted_sum(flat)


def weighted_sum(flat: Tensor) -> int:
    """Return the sum of 32-bit words, weighted by position, on their device.

    With 64-bit words the signs of two float64 numbers could flip together unnoticed.

    Args:
        flat: bytes.
    """
    is_whole = flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0
    words = flat.view(torch.int32) if is_whole else flat
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), _WORDS):
        part = words[begin : begin + _WORDS]
        places = torch.arange(begin, begin + part.numel(), device=flat.device)
        total += (part.to(torch.int64) * _weights(places)).sum()
    return int(total)


def _weights(places: Tensor) -> Tensor:
    """Return odd 64-bit pseudorandom numbers (splitmix64, Steele et al. 2014)."""
    mixed = (places + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1

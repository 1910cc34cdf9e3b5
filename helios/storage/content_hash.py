"""A fingerprint of nested values, such as a batch: 64 bits over types, names, shapes and elements.

It is the same in every process and on every machine of the same byte order. Nothing is pickled, and
no code of the values' classes is run: what is neither a tensor, an array, a plain value nor a
container of these is counted as unseen, and only its type enters the fingerprint.
"""

from __future__ import annotations

import struct
from collections import UserDict, deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from helios.storage.checksums import array_sum, tensor_sum

_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_ARRAYS = (np.ndarray, np.generic)
_MOST_NESTED = 100
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


def fingerprint(value: Any, *salt: int) -> Fingerprint:
    """Return the fingerprint of a value.

    Args:
        value: tensors, arrays, plain values, and containers of these.
        salt: numbers that enter it, too, so that equal values in different places differ.
    """
    reader = _Reader(struct.pack(f"<{len(salt)}q", *salt))
    reader.add(value, 0)
    data = b"".join(reader.parts)
    found = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return Fingerprint(found, reader.num_unseen)


def hash_indices(indices: Any, *salt: int) -> int:
    """Return 64 bits over the indices of the samples of a batch, of any type, in order.

    Args:
        indices: a list of them; a single one if batches are not collated.
        salt: as in :func:`fingerprint`.
    """
    numbers = indices if isinstance(indices, list) else [indices]
    try:
        data = struct.pack(f"<{len(salt) + len(numbers)}q", *salt, *numbers)
    except (struct.error, TypeError):
        return fingerprint(indices, *salt).value
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _token(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data


@lru_cache(maxsize=256)
def _token_of_form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return _token(f"{dtype} {tuple(shape)}")


@final
class _Reader:
    """Lists what enters the hash: for each value a token of its type, and its content."""

    def __init__(self, head: bytes) -> None:
        self.parts = [head]
        self.num_unseen = 0

    def _add_text(self, text: str) -> None:
        self.parts.append(_token(text))

    def add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, _ARRAYS):
            self._add_array(value)
        elif kind in _ATOMS:
            self._add_text(f"{kind.__name__} {value!r}")
        elif depth == _MOST_NESTED:
            self._add_unseen(value)
        else:
            self._add_members(value, depth + 1)

    def _add_members(self, value: Any, depth: int) -> None:
        members: Iterable[Any]
        if isinstance(value, dict | UserDict):
            items = value.data if isinstance(value, UserDict) else value
            self._add_text(f"mapping {len(items)}")
            members = chain.from_iterable(dict.items(items))
        elif isinstance(value, tuple):
            self._add_text(f"tuple {len(value)}")
            members = value
        elif isinstance(value, list | deque):
            self._add_text(f"list {len(value)}")
            members = value
        elif is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value)]
            self._add_text(f"{type(value).__qualname__} {names}")
            members = (getattr(value, name, None) for name in names)
        else:
            self._add_unseen(value)
            return
        for member in members:
            self.add(member, depth)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            self._add_unseen(tensor)
            return
        self.parts.append(_token_of_form(tensor.dtype, tensor.shape))
        self.parts.append(_NUMBER.pack(tensor_sum(tensor) & _MAX_NUMBER))

    def _add_array(self, array: Any) -> None:
        if array.dtype.hasobject:
            self._add_unseen(array)
            return
        self._add_text(f"{array.dtype.str} {array.shape}")
        self.parts.append(_NUMBER.pack(array_sum(np.asarray(array))))

    def _add_unseen(self, value: object) -> None:
        self.num_unseen += 1
        self._add_text(f"unseen {type(value).__module__}.{type(value).__qualname__}")

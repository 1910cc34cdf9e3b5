"""Digests of codes, and marks of any value, which are equal if nothing has changed."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator
from helios.core.utils import version_of
from helios.state.values import ATOMS, children_of, each_in, is_dense, refer_to
from helios.storage.codes import FACTORIES, NATIVE, TAG, Coder, Unsavable
from helios.storage.content_hash import array_sum, tensor_sum
from helios.storage.plain_objects import OUTSIDE, attributes_of, comes_from, table_of

CODE: Final = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""Types that are compared by identity: created by imports, and never changed."""

_LONG_WRITE = 1 << 14


class _Sink:
    """A file that keeps the hash and the size of what is written to it."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)
        self.size = 0

    def write(self, data: Any) -> int:
        size = len(data)
        self.size += size
        # A checksum of much is several times as fast, and its size tells the rest.
        is_long = size >= _LONG_WRITE
        self.hash.update(b"%d %d" % (size, zlib.crc32(data)) if is_long else data)
        return size


class _Pickler(pickle.Pickler):
    """Pickles codes into a hash, tensors by their checksums."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, protocol=5)
        # Without pickle's memo, equal codes have equal bytes whether they are one object or two.
        self.fast = True
        self._sink = sink

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            self._sink.size += part.nbytes
            form = str(part.dtype), tuple(part.shape), part.stride(), part.device.type
            return _form, (*form, tensor_sum(part))
        if isinstance(part, torch.dtype | torch.device | torch.Size):
            return _form, (str(part),)
        return NotImplemented


def _form(*parts: Any) -> None:
    """Stand before the description of what is no plain value."""


def digest_of(code: Any) -> tuple[Any, int]:
    """Return a digest that is equal for equal codes, and the size of the code in bytes."""
    kind = type(code)
    if kind in NATIVE:
        if kind is float:
            return (kind, struct.pack("<d", code)), 8
        return (kind, code), len(code) if kind is str else 8
    sink = _Sink()
    _Pickler(sink).dump(code)
    return sink.hash.digest(), sink.size


@final
class Identities:
    """Numbers for objects that are compared by identity. No number is given twice.

    An address alone is not enough: a new object may have that of a deleted one.

    Attributes:
        num_given: how many were given.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self.num_given = 0

    def number(self, value: object) -> int:
        """Return the number of an object; an iterator gets a new one in each call."""
        known = self._numbers.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        self.num_given += 1
        is_moving = isinstance(value, Iterator) and not isinstance(
            value, (io.IOBase, *weakref.ProxyTypes)
        )
        if not is_moving:
            self._numbers[id(value)] = refer_to(value), self.num_given
        return self.num_given


@final
class _Describer(Coder):
    """Gives every value a code, if only one to compare by.

    Args:
        identities: numbers for what is compared by identity.
        names: names of objects that stand for their content, by id.
    """

    def __init__(self, identities: Identities, names: Mapping[int, str]) -> None:
        super().__init__()
        self._number, self._known = identities.number, names

    def refer(self, path: str, part: Any) -> dict[str, Any] | None:
        """Return a reference to what has a name, or was met before."""
        name = self._known.get(id(part))
        return super().refer(path, part) if name is None else {TAG: "ref", "name": name}

    def code_other(self, path: str, value: Any) -> Any:
        """Return the code of a value, or a description."""
        if isinstance(value, Tensor):
            return self._sum_of_tensor(path, value)
        if isinstance(value, np.ndarray):
            return self._sum_of_array(path, value)
        if is_generator(value):
            return super().code_other(path, value)
        if isinstance(value, nn.Module):
            return self.refer(path, value) or self._described(path, value, attributes_of(value))
        try:
            return super().code_other(path, value)
        except Unsavable:
            return self.refer(path, value) or self._described(path, value, self._content(value))

    def _described(self, path: str, value: Any, content: Any) -> Any:
        kind = type(value).__qualname__
        return {TAG: "other", "type": kind, "content": self.code(f"{path}.<content>", content)}

    def _content(self, value: Any) -> Any:
        if isinstance(value, (*CODE, MethodType, Dataset, DataLoader, *weakref.ProxyTypes)):
            return self._number(value)
        if isinstance(value, io.IOBase):
            is_open = not value.closed and value.seekable()
            return self._number(value), value.closed, is_open and value.tell()
        if type(value) is memoryview:
            return self._number(value), 0 if value.readonly else zlib.crc32(value.tobytes())
        own = {} if comes_from(type(value), OUTSIDE) else attributes_of(value)
        return self._reduced(value), own

    def _reduced(self, value: Any) -> Any:
        """Return what pickle would take an object apart into."""
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(5) if reducer is None else reducer(value)
        except Exception:  # user code
            return self._number(value)
        if not isinstance(found, tuple):
            return found
        return [*found[:3], *(list(piece) for piece in found[3:5] if piece is not None)]

    def _defaultdict(self, path: str, value: Any) -> Any:
        # What is met while a code fails has a name, which would stand for its content.
        factory = value.default_factory
        if factory is None or factory in FACTORIES.values():
            return self._mapping(path, value)
        return self.refer(path, value) or self._described(path, value, (factory, dict(value)))

    def _set_of_any(self, path: str, value: Any) -> Any:
        if not ATOMS.issuperset(map(type, value)):
            return self.refer(path, value) or self._described(path, value, list(value))
        return self._set(path, value)

    def _sum_of_tensor(self, path: str, part: Tensor) -> Any:
        if ref := self.refer(path, part):
            return ref
        form = str(part.dtype), tuple(part.shape), part.requires_grad
        if is_dense(part):
            content: tuple[Any, ...] = part.stride(), part.device.type, tensor_sum(part)
        elif part.layout is torch.sparse_coo:
            inside = part.detach().coalesce()
            content = tensor_sum(inside.indices()), tensor_sum(inside.values())
        else:
            content = self._number(part), version_of(part)
        return {TAG: "tensor", "content": (*form, *content), "own": self._own_of(path, part)}

    def _sum_of_array(self, path: str, part: Any) -> Any:
        if part.dtype.hasobject:
            return self._described(path, part, (repr(part.dtype), part.shape, part.tolist()))
        if ref := self.refer(path, part):
            return ref
        if isinstance(part, np.memmap) and not part.flags.writeable:
            return {TAG: "array", "content": self._number(part)}
        content = repr(part.dtype), part.shape, array_sum(part)
        return {TAG: "array", "content": content, "own": self._own_of(path, part)}

    def _own_of(self, path: str, part: Any) -> Any:
        """Return the code of what a subclass adds to a tensor or an array, such as a mask."""
        is_plain = type(part) in (Tensor, nn.Parameter, np.ndarray)
        return None if is_plain else self.code(f"{path}.<own>", table_of(part))

    def flat(self, root: Any) -> list[Any]:
        """Return descriptions of what is nested too deeply for one, and of all that it leads to."""
        found = []
        for value in each_in(root, children_of):
            if type(value) not in ATOMS:
                kind = type(value).__qualname__
                atoms = [each if type(each) in ATOMS else None for each in children_of(value)]
                is_leaf = isinstance(value, Tensor | np.ndarray | np.generic) or is_generator(value)
                found.append([kind, atoms, self.code("", value) if is_leaf else None])
        return found

    makers: ClassVar[dict[type, Callable[[Any, str, Any], Any]]] = {
        **{k: m for k, m in Coder.makers.items() if k is not Tensor and k is not np.ndarray},
        **dict.fromkeys((set, frozenset), _set_of_any),
        defaultdict: _defaultdict,
    }


def mark_of(
    value: Any, identities: Identities | None = None, names: Mapping[int, str] | None = None
) -> bytes:
    """Return a mark of any value, which is equal for equal content.

    Args:
        value: the value.
        identities: numbers for what is compared by identity.
        names: names of objects that stand for their content, by id.
    """
    identities = identities or Identities()
    try:
        try:
            code = _Describer(identities, names or {}).code("", value)
        except RecursionError:
            code = _Describer(identities, names or {}).flat(value)
        found = digest_of(code)[0]
    except Exception as error:  # user code
        found = type(error).__name__, identities.number(value)
    return found if isinstance(found, bytes) else repr(found).encode()

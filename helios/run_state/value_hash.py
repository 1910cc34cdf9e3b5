"""Computes the mark of a value: a hash of tokens that describe its content in order.

Atoms are pickled; elements of large arrays and tensors only enter a checksum.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor, nn

from helios.core.memory import (
    address_of,
    extent_of,
    fills_its_reach,
    has_plain_bytes,
    root_of,
    span_of,
    storage_of,
)
from helios.run_state import unsupported_values
from helios.run_state.plain_values import Storages, Target
from helios.storage.checksums import array_sum, tensor_sum
from helios.storage.user_types import Alias

# The token before those of a part. No atom is a bytearray, so nothing else looks like it.
AGAIN, TUPLE, LIST, DEQUE, OBJECTS, MEMBER, FIELDS, NAMED, NUMBER, OBJECT = (
    bytearray([code]) for code in range(10)
)
TENSOR, _ARRAY, _SCALAR, _SHARES, _VIEW = (bytearray([code]) for code in range(10, 15))
KINDS: dict[type, bytearray] = {
    kind: bytearray(kind.__name__.encode())
    for kind in (dict, OrderedDict, Counter, defaultdict, set, frozenset)
}

_CHUNK = 1 << 12
_SHORT_BYTES = 1 << 10
_LONG_WRITE = 1 << 14


class Digest(NamedTuple):
    """What is kept of a value for comparison.

    Attributes:
        is_plain: whether it was a plain value.
        mark: hash of its types and bytes.
        size: its approximate size in bytes.
    """

    is_plain: bool
    mark: bytes
    size: int


@dataclass(slots=True)
class Look:
    """The result of scanning a value.

    Attributes:
        obstacle: why it is not plain, and the remedy; empty for a plain value.
        fault: the path to the part of it that the obstacle concerns; empty for all of it.
        mark: hash of its types and bytes.
        size: its approximate size in bytes.
        parts: addresses of its mutable parts: values with one in common are aliases.
        types: the enums and dataclasses in it.
        records: members of those and instances of these.
        aliases: tensors and arrays in it that share memory with what is saved elsewhere.
        memory: arrays and tensors on the host in it.
        lends: whether torch and NumPy may share some of that memory.
        reached: storages of which tensors and arrays in it see more than what is saved of them.
    """

    obstacle: str = ""
    fault: str = ""
    mark: bytes = b""
    size: int = 0
    parts: set[int] = field(default_factory=set)
    types: set[type] = field(default_factory=set)
    records: list[Any] = field(default_factory=list)
    aliases: list[tuple[Any, Alias]] = field(default_factory=list)
    memory: list[Any] = field(default_factory=list)
    lends: bool = False
    reached: set[int] = field(default_factory=set)

    @property
    def is_plain(self) -> bool:
        """Whether a checkpoint can hold the value."""
        return not self.obstacle

    @property
    def digest(self) -> Digest:
        """What is kept of the value for comparison."""
        return Digest(self.is_plain, self.mark, self.size)


def look_at_atom(value: Any) -> Look:
    """Scan a value without members, of which networks have thousands."""
    data = pickle.dumps(value, protocol=5)
    is_short = len(data) < _SHORT_BYTES
    return Look(mark=data if is_short else blake2b(data).digest(), size=len(data))


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


@final
class Marks:
    """Collects the tokens of one value.

    Args:
        storages: the tensors that are saved elsewhere.

    Attributes:
        tokens: those that were not written yet; callers may add atoms and containers of atoms.
        seen: the numbers of parts that may occur again, by address.
        look: the result.
    """

    def __init__(self, storages: Storages) -> None:
        self.tokens: list[Any] = []
        self.seen: dict[int, int] = {}
        self.look = Look()
        self._storages = storages
        self._sink = _Sink()
        self._pickler = pickle.Pickler(self._sink, protocol=5)
        # Without pickle's memo, equal atoms have equal bytes whether they are one object or two.
        self._pickler.fast = True
        self._dtypes: dict[np.dtype[Any], str] = {}
        # The first array or tensor in each memory.
        self._roots: dict[int, Any] = {}

    def flush(self, *, at_least: int = _CHUNK) -> None:
        """Write the tokens, if there are enough of them."""
        if len(self.tokens) >= at_least:
            self._pickler.dump(self.tokens)
            self.tokens.clear()

    def finish(self) -> Look:
        """Return the result, with the mark."""
        self.flush(at_least=0)
        self.look.mark = self._sink.hash.digest()
        self.look.size += self._sink.size
        return self.look

    def add_whole(self, part: Any) -> None:
        """Add a container of atoms, which pickle writes as a whole."""
        self.tokens.append(part)
        if len(part) > _CHUNK:
            self.flush(at_least=0)

    def add_array(self, array: np.ndarray[Any, Any]) -> None:
        """Add an array without objects."""
        strides = () if array.flags.c_contiguous else array.strides
        self.tokens += (_ARRAY, self._name_of(array.dtype), array.shape, strides)
        self.tokens.append(array.flags.writeable)
        target = self._storages.find(array)
        if target is not None:
            self._add_target(array, target)
            kind = np.lib.format.dtype_to_descr(array.dtype)
            geometry = array.shape, array.strides, target.offset, array.flags.writeable
            self.look.aliases.append((array, Alias(target.name, "array", kind, *geometry)))
            return
        if (within := self._storages.find_within(array)) is not None:
            self._refuse(unsupported_values.AROUND.format(within))
        root = array if array.base is None else root_of(array)
        self.look.parts.add(id(root))
        self.look.lends |= root is not array and not isinstance(root, np.ndarray | bytes)
        first = self._roots.setdefault(id(root), array)
        if first is not array:
            self.tokens += (_VIEW, self.seen[id(first)], address_of(array) - address_of(first))
        self.look.size += array.nbytes
        self.look.memory.append(array)
        self.tokens.append(array.tobytes() if array.nbytes < _SHORT_BYTES else array_sum(array))

    def add_scalar(self, part: np.generic) -> None:
        """Add a NumPy scalar."""
        self.tokens += (_SCALAR, self._name_of(part.dtype), part.tobytes())

    def add_saved(self, part: Tensor) -> bool:
        """Add the name of a tensor that is saved elsewhere; return whether it is one."""
        name = self._storages.name_of(part)
        if name is None:
            return False
        # Its type and whether it is frozen are saved with its module.
        self.tokens += (_SHARES, name)
        if not isinstance(part, nn.Parameter):
            # A resume creates a buffer of another form again, but keeps parameters as they are.
            self.tokens += _form_of(part)
        self.look.aliases.append((part, Alias(name, "itself", None, (), (), 0, flag=False)))
        return True

    def add_elements(self, part: Tensor) -> None:
        """Add the elements of a dense tensor, without its type and shape."""
        self.tokens.append(part.stride())
        target = self._storages.find(part)
        if target is not None:
            self._add_target(part, target)
            geometry = tuple(part.shape), part.stride(), target.offset, part.requires_grad
            self.look.aliases.append((part, Alias(target.name, "tensor", part.dtype, *geometry)))
            return
        storage = storage_of(part)
        self.look.parts.add(storage or id(part))
        if part.device.type == "cpu":
            self.look.memory.append(part)
            self.look.lends |= bool(storage) and not part.untyped_storage().resizable()
        first = self._roots.setdefault(storage or id(part), part)
        if first is not part:
            self.tokens += (_VIEW, self.seen[id(first)], part.data_ptr() - first.data_ptr())
        self.tokens.append(tensor_sum(part))
        self.look.size += part.nbytes

    def _add_target(self, part: Any, target: Target) -> None:
        """Add the tensor it is a part of, its position, and its layout, which may change too."""
        held = self._storages.tensor(target.name)
        assert held is not None
        self.tokens += (_SHARES, *target, *_form_of(held))
        begin, end = extent_of(part) if isinstance(part, np.ndarray) else span_of(part)
        first, last = span_of(held)
        is_within = first <= begin and end <= last and fills_its_reach(held)
        if begin >= end or is_within:
            return
        if target.name in self._storages.others:
            self._refuse(unsupported_values.BEYOND.format(target.name))
            self.tokens.append(
                array_sum(part) if isinstance(part, np.ndarray) else tensor_sum(part)
            )
        else:
            self.look.reached.add(storage_of(held))

    def _refuse(self, obstacle: str) -> None:
        self.look.obstacle = self.look.obstacle or obstacle

    def _name_of(self, dtype: np.dtype[Any]) -> str:
        name = self._dtypes.get(dtype)
        if name is None:
            name = self._dtypes[dtype] = repr(dtype)
        return name


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    if not has_plain_bytes(tensor):
        return ()
    size = tensor.untyped_storage().nbytes()
    geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return (str(tensor.dtype), *geometry, size)

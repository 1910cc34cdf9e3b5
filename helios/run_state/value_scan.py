"""Scans a value: whether it is plain, what it refers to, and a mark that reveals changes.

The mark contains only the names of what is saved elsewhere: networks, optimizers and parameters may
change in training without changing a value that refers to them. Values that cannot be pickled are
compared by identity.
"""

from __future__ import annotations

import copyreg
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, Flag
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from helios.core.memory import has_plain_bytes
from helios.core.sharded_tensors import is_sharded
from helios.run_state import unsupported_values
from helios.run_state.plain_values import (
    ATOMS,
    FACTORIES,
    SCALARS,
    Identities,
    Storages,
    Surroundings,
    are_atoms,
    are_shallow,
    field_values,
    fields_of,
    flags_in,
    is_single,
)
from helios.run_state.value_hash import (
    AGAIN,
    DEQUE,
    FIELDS,
    KINDS,
    LIST,
    MEMBER,
    NAMED,
    NUMBER,
    OBJECT,
    OBJECTS,
    TENSOR,
    TUPLE,
    Look,
    Marks,
    look_at_atom,
)
from helios.storage.checksums import array_sum

MAX_DEPTH = 100
"""Maximum depth of plain values: reading and writing files is recursive."""

# Code never changes; data sets and loaders are the data's own state.
_OPAQUE = (type, FunctionType, ModuleType, Dataset, DataLoader)
# Only these can be filled after something refers to them, so they may contain themselves.
_OPEN_KINDS = (list, dict, OrderedDict)


def look_at(value: Any, surroundings: Surroundings, identities: Identities) -> Look:
    """Scan a value. Types, order, bytes and shared objects count.

    Args:
        value: the value.
        surroundings: what is saved elsewhere.
        identities: numbers for what cannot be pickled.
    """
    if type(value) in ATOMS:
        return look_at_atom(value)
    try:
        walk = _Walk(surroundings, identities)
        walk.enter(value)
        look = walk.finish()
    except Exception as error:  # user code, called while an object is reduced
        look = Look(obstacle=unsupported_values.BROKEN.format(type(error).__name__))
        look.mark = b"%d" % identities.number(value)
    return look


def mark_of_state(state: Any, identities: Identities) -> bytes:
    """Return a mark that is equal for equal content, on whichever device its tensors are."""
    return look_at(state, _Nothing(), identities).mark


class _Nothing:
    """Surroundings in which nothing is saved elsewhere: content counts, sharing does not."""

    def name_of(self, value: object) -> str | None:
        return None

    @property
    def storages(self) -> Storages:
        return Storages({})


@final
class _Walk:
    def __init__(self, surroundings: Surroundings, identities: Identities) -> None:
        self._surroundings = surroundings
        self._identities = identities
        self._marks = Marks(surroundings.storages)
        self._look = self._marks.look
        self._tokens = self._marks.tokens
        self._seen = self._marks.seen
        self._way: list[tuple[Any, Iterator[Any]]] = []
        # Temporary objects must live as long as their ids are remembered.
        self._made: list[Any] = []

    def enter(self, value: Any) -> None:
        """Walk through a value, depth first."""
        tokens, way = self._tokens, self._way
        way.append((None, iter((value,))))
        while way:
            for part in way[-1][1]:
                kind = type(part)
                if kind in ATOMS:
                    tokens.append(part)
                    continue
                members = _HANDLERS.get(kind, _Walk.enter_other)(self, part)
                if members is not None:
                    way.append((part, iter(members)))
                    break
            else:
                way.pop()
            self._marks.flush()
            if len(way) > MAX_DEPTH:
                self._refuse(unsupported_values.TOO_DEEP.format(MAX_DEPTH))

    def finish(self) -> Look:
        """Return the result."""
        return self._marks.finish()

    def _refuse(self, obstacle: str, part: Any = None) -> None:
        """Record the first obstacle, and the part of the value it concerns, unless it is all."""
        if not self._look.obstacle:
            self._look.obstacle = obstacle
            open_parts = [holder for holder, _ in self._way[1:]]
            self._look.fault = (
                "" if part is None else unsupported_values.way_to([*open_parts, part])
            )

    def _is_again(self, part: Any, *, is_mutable: bool = True) -> bool:
        """Record a part that may be shared, and return whether it was seen before."""
        number = self._seen.get(id(part))
        if number is not None:
            self._tokens += (AGAIN, number)
            self._check_circle(part)
            return True
        self._seen[id(part)] = len(self._seen)
        if is_mutable:
            self._look.parts.add(id(part))
        return False

    def _check_circle(self, part: Any) -> None:
        kinds = [type(open_part) for open_part, _ in self._way]
        begin = next((n for n, (open_part, _) in enumerate(self._way) if open_part is part), None)
        if begin is not None and not all(
            kind in _OPEN_KINDS or fields_of(kind) is not None for kind in kinds[begin:]
        ):
            self._refuse(unsupported_values.CIRCLE)

    def enter_tuple(self, part: tuple[Any, ...]) -> Iterable[Any] | None:
        if are_atoms(part):
            self._marks.add_whole(part)
            return None
        self._tokens += (TUPLE, len(part))
        return part

    def enter_list(self, part: list[Any]) -> Iterable[Any] | None:
        if self._is_again(part):
            return None
        if are_shallow((part,)):
            self._marks.add_whole(part)
            return None
        self._tokens += (LIST, len(part))
        return part

    def enter_dict(self, part: dict[Any, Any]) -> Iterable[Any] | None:
        if self._is_again(part):
            return None
        attributes = vars(part) if type(part) is OrderedDict else None
        self._tokens += (KINDS[type(part)], len(part))
        if attributes:
            return (*chain.from_iterable(part.items()), attributes)
        if are_shallow((part, part.values())):
            self._marks.add_whole(dict(part))
            return None
        return chain.from_iterable(part.items())

    def enter_defaultdict(self, part: defaultdict[Any, Any]) -> Iterable[Any] | None:
        factory = part.default_factory
        if factory in FACTORIES:
            self._tokens.append(str(factory))
            return self.enter_dict(part)
        self._refuse(unsupported_values.FACTORY, part)
        return None if self._is_again(part) else (factory, *chain.from_iterable(part.items()))

    def enter_deque(self, part: deque[Any]) -> Iterable[Any] | None:
        if self._is_again(part):
            return None
        self._tokens += (DEQUE, len(part), part.maxlen)
        if not are_shallow((part,)):
            return part
        self._marks.add_whole(list(part))
        return None

    def enter_set(self, part: set[Any] | frozenset[Any]) -> Iterable[Any] | None:
        if type(part) is set and self._is_again(part):
            return None
        self._tokens += (KINDS[type(part)], len(part))
        if are_shallow((part,)):
            self._marks.add_whole(list(part))
            return None
        if any(isinstance(member, Tensor) for member in part):
            # Identity alone would find it again, and no checkpoint keeps that.
            self._refuse(unsupported_values.IN_SET, part)
        return part

    def enter_array(self, part: np.ndarray[Any, Any]) -> Iterable[Any] | None:
        if self._is_again(part, is_mutable=False):
            return None
        if part.dtype == object:
            self._look.parts.add(id(part))
            self._tokens += (OBJECTS, part.shape)
            members: list[Any] = part.reshape(-1).tolist()
            self._made.append(members)
            return members
        if part.dtype.hasobject:
            return self._reduce(part)
        self._marks.add_array(part)
        return None

    def enter_scalar(self, part: np.generic) -> None:
        if part.dtype.hasobject:
            self._refuse(unsupported_values.IN_SCALAR, part)
        self._marks.add_scalar(part)

    def enter_tensor(self, part: Tensor) -> Iterable[Any] | None:
        if self._is_again(part, is_mutable=False) or self._marks.add_saved(part):
            return None
        self._tokens += (TENSOR, str(part.dtype), tuple(part.shape), part.device.type)
        self._tokens += (part.requires_grad, part.is_leaf)
        if is_sharded(part):
            self._refuse(unsupported_values.SHARDED, part)
            return self._enter_odd_tensor(part)
        if not has_plain_bytes(part):
            self._refuse(unsupported_values.NO_STORAGE.format(part.layout), part)
            return self._enter_odd_tensor(part)
        if not part.is_leaf:
            self._refuse(unsupported_values.GRAPH, part)
        elif type(part) is not Tensor:
            # A parameter would be restored as a tensor: it is saved separately, or not at all.
            self._refuse(unsupported_values.STRAY_PARAMETER.format(type(part).__name__), part)
        self._marks.add_elements(part)
        return None

    def _enter_odd_tensor(self, part: Tensor) -> Iterable[Any] | None:
        if part.layout is torch.sparse_coo:
            parts = [part.detach()._indices(), part.detach()._values()]  # noqa: SLF001
            self._made += parts
            return parts
        version = 0 if part.is_inference() else part._version  # noqa: SLF001
        self._tokens += (NUMBER, self._identities.number(part), version)
        return None

    def enter_other(self, part: Any) -> Iterable[Any] | None:
        if isinstance(part, Enum):
            self._add_member(part)
            return None
        if is_single(part):
            self._tokens.append(part)
            return None
        name = self._surroundings.name_of(part)
        if name is not None:
            self._refuse(unsupported_values.REFERENCE.format(name), part)
            self._tokens += (NAMED, name)
            return None
        if isinstance(part, Tensor):
            return self.enter_tensor(part)
        if isinstance(part, _OPAQUE):
            self._add_opaque(part)
            return None
        if isinstance(part, io.IOBase):
            self._add_file(part)
            return None
        if isinstance(part, np.memmap):
            self._add_memmap(part)
            return None
        names = fields_of(type(part))
        return self._reduce(part) if names is None else self._enter_fields(part, names)

    def _add_member(self, part: Enum) -> None:
        kind = type(part)
        names = flags_in(part) if isinstance(part, Flag) else [part.name]
        if names is None:
            self._refuse(unsupported_values.FLAGS.format(part), part)
        self._look.types.add(kind)
        self._look.records.append(part)
        self._tokens += (MEMBER, self._identities.number(kind), names or repr(part))

    def _enter_fields(self, part: Any, names: tuple[str, ...]) -> Iterable[Any] | None:
        contents = field_values(part, names)
        if contents is None:
            return self._reduce(part)
        if self._is_again(part):
            return None
        self._look.types.add(type(part))
        self._look.records.append(part)
        self._tokens += (FIELDS, self._identities.number(type(part)))
        return contents.values()

    def _add_opaque(self, part: Any) -> None:
        if isinstance(part, type) and (issubclass(part, Enum) or fields_of(part) is not None):
            self._look.types.add(part)
        self._refuse(unsupported_values.without_state(part), part)
        self._tokens += (NUMBER, self._identities.number(part))

    def _add_file(self, part: io.IOBase) -> None:
        self._refuse(unsupported_values.FILE, part)
        self._tokens += (NUMBER, self._identities.number(part), part.closed)
        if not part.closed and part.seekable():
            self._tokens.append(part.tell())

    def _add_memmap(self, part: np.memmap[Any, Any]) -> None:
        self._refuse(unsupported_values.MAPPED, part)
        self._tokens += (NUMBER, self._identities.number(part), part.shape)
        # A read-only file cannot have changed, and may be too large to read.
        if part.flags.writeable:
            self._tokens.append(array_sum(part))

    def _reduce(self, part: Any) -> Iterable[Any] | None:
        """Take an object apart as pickle would; one that refuses is compared by identity."""
        self._refuse(unsupported_values.without_state(part), part)
        if self._is_again(part, is_mutable=False):
            return None
        try:
            reducer = copyreg.dispatch_table.get(type(part))
            reduced = part.__reduce_ex__(5) if reducer is None else reducer(part)
        except Exception:  # user code
            reduced = None
        if not isinstance(reduced, tuple):
            self._tokens += (NUMBER, self._identities.number(part))
            return None
        # Members come from iterators, which this loop would exhaust.
        whole = [*reduced[:3], *(list(piece) for piece in reduced[3:5] if piece is not None)]
        self._made.append(whole)
        self._tokens += (OBJECT, len(whole))
        return whole


_HANDLERS: dict[type, Callable[[_Walk, Any], Iterable[Any] | None]] = {
    tuple: _Walk.enter_tuple,
    list: _Walk.enter_list,
    dict: _Walk.enter_dict,
    OrderedDict: _Walk.enter_dict,
    Counter: _Walk.enter_dict,
    defaultdict: _Walk.enter_defaultdict,
    deque: _Walk.enter_deque,
    set: _Walk.enter_set,
    frozenset: _Walk.enter_set,
    np.ndarray: _Walk.enter_array,
    Tensor: _Walk.enter_tensor,
    **dict.fromkeys(SCALARS, _Walk.enter_scalar),
}

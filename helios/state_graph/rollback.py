"""Puts back what objects held, in place: references to them stay valid and see their old content.

Where a block must not write in place, because autograd still needs what is there, it gets copies.

What :class:`~helios.state_graph.graph.Graph` walks is what a checkpoint holds of an owner. Within a
process more can be put back, and must be: what is declared as unsaved, what torch and Helios keep
in attributes, and objects that training makes. So everything is followed, and nothing is named.

Buffers, which every window puts back, have copies of their own: networks are walked once, and then
only a flat list of tensors is copied.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from helios.core import rng
from helios.core.generators import Generator, is_generator, load_generator, state_of_generator
from helios.core.memory import has_plain_bytes, is_expanded, storage_bytes, storage_of
from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.state_graph.memory_groups import copies_of
from helios.state_graph.values import (
    ATOMS,
    CONTAINERS,
    OUTSIDE,
    RESOURCES,
    WITHOUT_ATTRIBUTES,
    are_atoms,
    attributes_of,
    children_of,
    comes_from,
    content_of,
    delete_attribute,
    each_in,
    is_mutable,
    is_plain_object,
    refill,
    slots_of,
    table_of,
)

_Restore: TypeAlias = Callable[[], object]

_OF_OTHERS = (
    *("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.distributed"),
    *("helios.trainer", "helios.startup", "helios.session", "helios.loops", "helios.hooks"),
    *("helios.checkpoint", "helios.data.datamodule", "helios.state_graph.discovery"),
    "helios.sharding",
)
"""Modules whose objects a model or plugin refers to without owning them."""

_NOT_OF_USERS = frozenset(("torch", "helios"))
"""Packages whose objects, such as those of FSDP, are not taken apart for copies."""

_LEFT_ALONE = (type, ModuleType, Enum, Dataset, DataLoader)


@final
class Rollback:
    """The content of some objects and of all that they refer to, to be put back.

    Left alone are data sets, classes, Python modules, loggers, what functions share with the code
    around them, and objects that hold a thread, a lock, a queue, a file or a connection.

    Args:
        owners: the objects.
        leaving: objects that are left alone, however they are reached.
        on_host: whether tensors are copied to the host, where there is more memory.

    Raises:
        UsageError: for a network with lazy parameters, whose first batch cannot be undone.
    """

    def __init__(
        self, owners: Iterable[object], *, leaving: Iterable[object] = (), on_host: bool = True
    ) -> None:
        self._on_host = on_host
        self._restores: list[_Restore] = []
        self._storages: set[tuple[torch.device, int]] = set()
        owners = tuple(owners)
        self._owners = set(map(id, owners))
        self._left = {id(each): each for each in leaving}
        for _ in each_in(owners, self._visit):
            continue

    def put_back(self) -> None:
        """Give the objects the content that they had."""
        for restore in self._restores:
            restore()

    def _visit(self, value: Any) -> Iterable[Any]:
        """Record how to put back what an object holds; returns what it refers to."""
        if self._passes_over(value):
            return ()
        self._add(value)
        return table_of(value).values() if type(value) is FunctionType else children_of(value)

    def _passes_over(self, value: Any) -> bool:
        kind = type(value)
        if kind in ATOMS or id(value) in self._left:
            return True
        if id(value) in self._owners or is_mutable(value) or isinstance(value, Tensor | nn.Module):
            return False
        if isinstance(value, _LEFT_ALONE) or comes_from(kind, OUTSIDE):
            return True
        if any(base.__module__.startswith(_OF_OTHERS) for base in kind.__mro__):
            return True
        held = table_of(value).values()
        return any(type(each).__module__.partition(".")[0] in RESOURCES for each in held)

    def _add(self, value: Any) -> None:
        add = self._restores.append
        if is_mutable(value):
            self._add_content(value)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                plain = value.view(np.ndarray)
                add(partial(np.copyto, plain, plain.copy()))
        elif is_generator(value):
            add(partial(load_generator, value, copy.deepcopy(state_of_generator(value))))
        self._add_attributes(value)

    def _add_content(self, part: Any) -> None:
        self._restores.append(partial(_restore_content, part, content_of(part)))
        if isinstance(part, defaultdict):
            guard = vars(defaultdict)["default_factory"]
            self._restores.append(partial(guard.__set__, part, part.default_factory))

    def _add_attributes(self, value: Any) -> None:
        if type(value) in WITHOUT_ATTRIBUTES:
            return
        self._add_content(table_of(value))
        for name, guard in slots_of(type(value)).items():
            try:
                self._restores.append(partial(guard.__set__, value, guard.__get__(value)))
            except AttributeError:
                self._restores.append(partial(delete_attribute, value, name))

    def _add_tensor(self, tensor: Tensor) -> None:
        add = self._restores.append
        if is_lazy(tensor):
            raise UsageError(
                "A sanity check needs complete networks, got a lazy parameter. Run one batch "
                "through the network in setup(), or train without sanity_steps."
            )
        place = (tensor.device, storage_of(tensor))
        if tensor.layout is not torch.strided:
            add(partial(_restore_sparse, tensor, tensor.detach().clone()))
        elif place[1] or not tensor.numel():
            add(partial(_restore_place, tensor, tensor.detach()))
        if place[1] and place not in self._storages:
            self._storages.add(place)
            whole = storage_bytes(tensor.detach())
            copied = whole.to("cpu", copy=True) if self._on_host else whole.clone()
            add(partial(_restore_bytes, whole, copied))
        if tensor.is_leaf:
            add(partial(_restore_leaf, tensor, tensor.grad, tensor.requires_grad))


def _restore_content(part: Any, before: Collection[Any]) -> None:
    if isinstance(part, dict):
        now = content_of(part)
        pairs = zip(now, before, strict=False)
        if len(now) == len(before) and all(a is c and b is d for (a, b), (c, d) in pairs):
            # The attributes of an object, mostly.
            return
    refill(part, before)


def _restore_leaf(tensor: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    if tensor.grad is not grad:
        tensor.grad = grad


def _restore_place(tensor: Tensor, alias: Tensor) -> None:
    """Make a tensor refer to its former storage again."""
    with torch.no_grad():
        is_there = (
            storage_of(tensor) == storage_of(alias)
            and tensor.device == alias.device
            and tensor.dtype == alias.dtype
            and tensor.shape == alias.shape
            and tensor.stride() == alias.stride()
            and tensor.storage_offset() == alias.storage_offset()
        )
        if not is_there:
            tensor.data = alias


def _restore_sparse(tensor: Tensor, before: Tensor) -> None:
    tensor.data = before.clone()


def _restore_bytes(whole: Tensor, before: Tensor) -> None:
    # Memory that was mapped from a file may be read-only.
    if not (whole.is_cpu and torch.equal(whole, before)):
        whole.copy_(before)


@final
class ValueCopier:
    """Copies values, in place of which a block may use and change the copies.

    Plain objects of users stay the same objects; what they hold is copied. Modules and parameters
    are not copied, nor are generators.

    What occurs twice is copied once, and tensors that share elements still do.

    Args:
        kept: what is not copied.

    Attributes:
        generators: the generators that were found.
        objects: the plain objects that were found.
        attributes: copies of what these hold.
    """

    def __init__(self, kept: Iterable[Any]) -> None:
        self.generators: list[Generator] = []
        self.objects: list[Any] = []
        self.attributes: list[dict[str, Any]] = []
        # A value is kept with its copy, because an id is unique only while it exists.
        self._done: dict[int, tuple[Any, Any]] = {id(part): (part, part) for part in kept}
        self._tensors: dict[int, Tensor] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy, or the value itself if it is of another kind."""
        found = self._copy(value)
        for number, twin in copies_of(self._tensors).items():
            self._done[number][1].data = twin
        self._tensors = {}
        return found

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        number = id(value)
        if number in self._done:
            return self._done[number][1]
        if kind in CONTAINERS:
            # With the factory of a defaultdict, and the length of a deque.
            twin = value.copy() if kind is dict else copy.copy(value)
            self._done[number] = (value, twin)
            self._fill(twin, value)
            return twin
        if kind is tuple:
            twin = value if are_atoms(value) else tuple(map(self._copy, value))
        else:
            twin = self._copy_object(value)
        self._done[number] = (value, twin)
        return twin

    def _fill(self, twin: Any, value: Any) -> None:
        """Put copies into a container that has the members of another one."""
        if isinstance(value, dict):
            for key, member in value.items():
                if type(member) not in ATOMS:
                    twin[key] = self._copy(member)
        elif type(value) is not frozenset and not are_atoms(value):
            refill(twin, [*map(self._copy, value)])

    def _copy_object(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) is np.ndarray:
            return value.copy(order="K")
        if isinstance(value, rng.DefaultNumpyRNG):
            self.generators.append(value.generator)
        elif is_generator(value):
            self.generators.append(value)
        elif _is_of_user(type(value)):
            self._done[id(value)] = (value, value)
            self.objects.append(value)
            self.attributes.append({})
            attributes = self.attributes[-1]
            attributes.update((k, self._copy(v)) for k, v in attributes_of(value).items())
        return value

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad or is_sharded(tensor):
            return tensor
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if type(tensor) is not Tensor or not has_plain_bytes(tensor) or is_lazy:
            return tensor.clone()
        if is_expanded(tensor):
            # Nothing may change it in place.
            return tensor
        # Filled when all tensors of its memory are known.
        self._tensors[id(tensor)] = tensor
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _is_of_user(kind: type) -> bool:
    """Return whether instances of a class are a user's own, and consist of attributes."""
    return is_plain_object(kind) and not comes_from(kind, _NOT_OF_USERS)


Values: TypeAlias = list[Tensor | None]
Networks: TypeAlias = Callable[[], Mapping[str, nn.Module]]

_KIND = attrgetter("shape", "dtype")


@final
class Copies:
    """Values of buffers at one time.

    Args:
        values: the values; ``None`` of buffers that held no tensor.
        buffers: the tensors that held them.

    Attributes:
        values: the same.
        buffers: the same.
        kinds: what others must have in common with them to take their values.
    """

    __slots__ = ("buffers", "kinds", "values")

    def __init__(self, values: Values, buffers: Values) -> None:
        self.values, self.buffers, self.kinds = values, buffers, _kinds_of(values)


@final
class BufferPlaces:
    """Where networks hold buffers, including those that are not saved.

    Args:
        networks: the networks; buffers that are still lazy are left out.
    """

    def __init__(self, networks: Iterable[nn.Module] = ()) -> None:
        parts = {id(part): part for network in networks for part in network.modules()}
        tables = map(_table_of, parts.values())
        # Buffers that are None count: they may hold a tensor later.
        self._places = [
            (table, name)
            for table in tables
            for name, buffer in table.items()
            if not is_lazy(buffer)
        ]

    def __bool__(self) -> bool:
        return bool(self._places)

    def present(self) -> Values:
        """Return the buffers as they are."""
        return [table.get(name) for table, name in self._places]

    def copies(self, reused: Copies | None = None) -> Copies:
        """Return copies of the buffers.

        Args:
            reused: earlier copies, whose memory is used again if they have the same shapes.
        """
        present = self.present()
        # A buffer may get another shape in place.
        if reused is None or reused.kinds != _kinds_of(present):
            values = [value if value is None else value.detach().clone() for value in present]
            return Copies(values, present)
        _copy(present, reused.values)
        reused.buffers = present
        return reused

    def put(self, copies: Copies, targets: Values | None = None) -> None:
        """Copy values into the buffers.

        Args:
            copies: the values.
            targets: the tensors that become the buffers; if omitted, those that are present stay.
        """
        targets = self.present() if targets is None else targets
        if _kinds_of(targets) != copies.kinds:
            targets = [*map(_target_for, copies.values, targets)]
        _copy(copies.values, targets)
        for (table, name), target in zip(self._places, targets, strict=True):
            table[name] = target


def _table_of(part: nn.Module) -> dict[str, Any]:
    table: Any = vars(part)["_buffers"]
    # Of a scripted module, whose table is no dict, only values can be put back.
    return table if isinstance(table, dict) else dict(table.items())


def _target_for(value: Tensor | None, present: Tensor | None) -> Tensor | None:
    """Return the tensor that takes a value: the present one if it can."""
    if _kinds_of([value]) == _kinds_of([present]):
        return present
    return None if value is None else torch.empty_like(value)


def _kinds_of(values: Values) -> tuple[list[bool], list[Any]]:
    """Return what copies have in common if they can take each other's values."""
    return [*map(is_, values, repeat(None))], [*map(_KIND, _tensors_in(values))]


def _tensors_in(values: Values) -> list[Tensor]:
    return [value for value in values if value is not None]


def _copy(sources: Values, targets: Values) -> None:
    tensors = _tensors_in(targets)
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(tensors, _tensors_in(sources))


@final
class BufferCopies:
    """Copies of all buffers of some networks, from before a window, to undo the whole window."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Release everything."""
        self._places = BufferPlaces()
        self._copies: Copies | None = None
        self.look_again()

    def look_again(self) -> None:
        """Search the networks again at the next window; the open one keeps its copies."""
        self._is_known = False

    def keep(self, find_networks: Networks) -> None:
        """Copy the buffers as they are now.

        Args:
            find_networks: returns the networks, by path.
        """
        if not self._is_known:
            self._is_known = True
            self._places, self._copies = BufferPlaces(find_networks().values()), None
        self._copies = self._places.copies(self._copies)

    def put_back(self) -> None:
        """Restore the values of the buffers, and the buffers of the networks."""
        if self._copies is not None:
            self._places.put(self._copies, self._copies.buffers)

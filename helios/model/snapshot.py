"""Snapshots of objects, restored after a sanity check, which must have no side effects.

Everything is restored in place: references to a list, a network or a tensor stay valid and see its
old content. Attributes are restored; ``state_dict`` is not called.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator, load_generator, state_of_generator
from helios.core.memory import storage_bytes, storage_of
from helios.data.keyed import KeyedDataset
from helios.errors import UsageError
from helios.state_graph.values import ATOMS

Restore: TypeAlias = Callable[[], object]

_OUTSIDE = frozenset(
    (
        *("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
        *("_asyncio", "socket", "_socket", "subprocess", "io", "_io", "sqlite3", "_sqlite3"),
    )
)
"""Modules whose objects use resources outside the process's memory, or belong to other threads."""

_MACHINERY = ("logging", "weakref", "_weakref", "ctypes", "_ctypes", "importlib", "inspect")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.distributed")
_HOUSE = (
    *("helios.trainer", "helios.startup", "helios.session", "helios.loops", "helios.hooks"),
    *("helios.checkpoint", "helios.data.datamodule", "helios.state_graph.discovery"),
    "helios.sharding",
)
"""Objects that a model or plugin refers to without owning them."""

_LEFT_ALONE = (type, FunctionType, ModuleType, Enum, Dataset, DataLoader)


class Snapshot:
    """A copy of the content of some objects, and of the objects that they refer to.

    Attributes, containers, arrays, tensors and generators are followed recursively. Not copied:
    data sets, classes, Python modules, loggers, and objects that hold a thread, a lock, a queue, a
    file or a connection. Tensors are copied to the host, each storage once.

    Args:
        owners: the model, the plugins and everything else that validation may change.

    Raises:
        UsageError: for a network with lazy parameters, whose first batch cannot be undone.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        looker = _Looker()
        looker.look(owners)
        self._restores = looker.restores
        # In runs that earlier versions began, no key seeds it; a user may have done so.
        self._numpy = np.random.get_state()

    def erase(self) -> None:
        """Restore the content of the objects."""
        for restore in self._restores:
            restore()
        np.random.set_state(self._numpy)


@final
class _Looker:
    """Visits each object once, and records how to restore it."""

    def __init__(self) -> None:
        self.restores: list[Restore] = []
        self._seen: dict[int, object] = {}
        self._waiting: list[Any] = []
        self._storages: set[tuple[torch.device, int]] = set()

    def look(self, owners: Iterable[object]) -> None:
        """Visit some objects, and all that they refer to."""
        for owner in owners:
            self._seen[id(owner)] = owner
            if isinstance(owner, DataLoader):
                self._pass_over_data(owner)
            if not self._visit_known(owner):
                self._visit_members(owner)
        while self._waiting:
            self._visit(self._waiting.pop())

    def _pass_over_data(self, loader: DataLoader[Any]) -> None:
        """Skip the data of a loader, whatever it is: samplers refer to it, too."""
        dataset = loader.dataset
        inner = dataset.dataset if isinstance(dataset, KeyedDataset) else dataset
        self._seen |= {id(data): data for data in (dataset, inner)}

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or id(value) in self._seen or isinstance(value, _LEFT_ALONE):
            return
        # Kept alive while its id is recorded: another object could get the same id.
        self._seen[id(value)] = value
        if self._visit_known(value) or _is_of_others(kind):
            return
        members = _attributes_of(value)
        if isinstance(value, nn.Module) or not any(map(_is_outside, members)):
            self._visit_members(value)

    def _visit_known(self, value: Any) -> bool:
        """Visit an object of a known kind; returns whether it was one."""
        if isinstance(value, Tensor):
            self._visit_tensor(value)
        elif isinstance(value, dict | list | set | deque | bytearray):
            self._visit_container(value)
        elif isinstance(value, tuple | frozenset):
            self._waiting += value
        elif isinstance(value, MethodType):
            self._waiting.append(value.__self__)
        elif isinstance(value, partial):
            self._waiting += (value.func, value.args, value.keywords)
        elif isinstance(value, np.ndarray):
            self._visit_array(value)
        else:
            restore = _generator_of(value)
            if restore is None:
                return False
            self.restores.append(restore)
        return True

    def _visit_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._visit_dict(value)
        else:
            self.restores.append(_list_restore(value))
            if not isinstance(value, bytearray):
                self._waiting += value
        # A user's class may add attributes to a container.
        self._visit_members(value)

    def _visit_dict(self, value: dict[Any, Any]) -> None:
        self.restores.append(_dict_restore(value))
        self._waiting += value.keys()
        self._waiting += value.values()

    def _visit_members(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._visit_dict(attributes)
        for descriptor in _slots_of(type(value)):
            try:
                member = descriptor.__get__(value)
            except AttributeError:
                self.restores.append(partial(_empty_slot, descriptor, value))
                continue
            self.restores.append(partial(descriptor.__set__, value, member))
            self._waiting.append(member)
        if isinstance(value, nn.Module):
            # A scripted module holds them outside its attributes.
            self._waiting += value.parameters(recurse=False)
            self._waiting += value.buffers(recurse=False)

    def _visit_array(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype == object:
            self._waiting += value.reshape(-1).tolist()
        if value.flags.writeable:
            plain = value.view(np.ndarray)
            self.restores.append(partial(np.copyto, plain, plain.copy()))
        self._visit_members(value)

    def _visit_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise UsageError(
                "A sanity check needs complete networks, got a lazy parameter. Run one batch "
                "through the network in setup(), or remove SanityCheck."
            )
        self._visit_members(tensor)
        alias = tensor.detach()
        place = (tensor.device, storage_of(tensor))
        if place[1]:
            self.restores.append(partial(_restore_place, tensor, alias))
        if place[1] and place not in self._storages:
            self._storages.add(place)
            whole = storage_bytes(alias)
            self.restores.append(partial(_restore_bytes, whole, whole.to("cpu", copy=True)))
        if tensor.is_leaf:
            self._waiting.append(tensor.grad)
            self.restores.append(partial(_restore_leaf, tensor, tensor.grad, tensor.requires_grad))


def _is_of_others(kind: type) -> bool:
    """Whether a class comes from one of the modules above, whose objects are left as they are."""
    if issubclass(kind, nn.Module):
        return False
    names = [base.__module__ for base in kind.__mro__]
    return any(
        name.partition(".")[0] in _OUTSIDE or name.startswith((*_MACHINERY, *_COMPILERS, *_HOUSE))
        for name in names
    )


def _is_outside(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in _OUTSIDE


def _attributes_of(value: object) -> Iterable[object]:
    return tuple(getattr(value, "__dict__", {}).values())


def _slots_of(kind: type) -> list[MemberDescriptorType]:
    return [
        descriptor
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for descriptor in vars(base).values()
        if isinstance(descriptor, MemberDescriptorType)
    ]


def _empty_slot(descriptor: MemberDescriptorType, owner: object) -> None:
    try:
        descriptor.__delete__(owner)
    except AttributeError:
        return


def _dict_restore(value: dict[Any, Any]) -> Restore:
    # The methods of the built-in class: those of a user's subclass could have side effects.
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    before = list(base.items(value))

    def restore() -> None:
        now = list(base.items(value))
        if len(now) == len(before) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)
        ):
            return
        base.clear(value)
        for key, member in before:
            base.__setitem__(value, key, member)

    return restore


def _list_restore(value: Any) -> Restore:
    base: Any
    if isinstance(value, list | bytearray):
        base = list if isinstance(value, list) else bytearray
        return partial(base.__setitem__, value, slice(None), base(base.__iter__(value)))
    base, extend = (set, set.update) if isinstance(value, set) else (deque, deque.extend)
    before = list(base.__iter__(value))

    def restore() -> None:
        base.clear(value)
        extend(value, before)

    return restore


def _generator_of(value: Any) -> Restore | None:
    """Return how to restore a random number generator; ``None`` for anything else."""
    if not is_generator(value):
        return None
    return partial(load_generator, value, copy.deepcopy(state_of_generator(value)))


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


def _restore_bytes(whole: Tensor, before: Tensor) -> None:
    if not torch.equal(whole.cpu(), before):
        whole.copy_(before)

"""Puts back what objects held, in place: references to them stay valid and see their old content.

What :class:`~helios.state_graph.graph.Graph` walks is what a checkpoint holds of an owner. Within a
process more can be put back, and must be: what is declared as unsaved, what torch and Helios keep
in attributes, and objects that training makes. So everything is followed, and nothing is named.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator, load_generator, state_of_generator
from helios.core.memory import storage_bytes, storage_of
from helios.errors import UsageError
from helios.state_graph.values import (
    ATOMS,
    OUTSIDE,
    RESOURCES,
    children_of,
    comes_from,
    content_of,
    delete_attribute,
    each_in,
    is_mutable,
    refill,
    slots_of,
)

_Restore: TypeAlias = Callable[[], object]

_OF_OTHERS = (
    *("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.distributed"),
    *("helios.trainer", "helios.startup", "helios.session", "helios.loops", "helios.hooks"),
    *("helios.checkpoint", "helios.data.datamodule", "helios.state_graph.discovery"),
    "helios.sharding",
)
"""Modules whose objects a model or plugin refers to without owning them."""

_LEFT_ALONE = (type, ModuleType, Enum, Dataset, DataLoader)


@final
class Rollback:
    """The content of some objects and of all that they refer to, to be put back.

    Left alone are data sets, classes, Python modules, loggers, and objects that hold a thread, a
    lock, a queue, a file or a connection.

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
        # In runs that earlier versions began, no key seeds it; a user may have done so.
        self._numpy = np.random.get_state()

    def put_back(self) -> None:
        """Give the objects the content that they had."""
        for restore in self._restores:
            restore()
        np.random.set_state(self._numpy)

    def _visit(self, value: Any) -> Iterable[Any]:
        """Record how to put back what an object holds; returns what it refers to."""
        if self._passes_over(value):
            return ()
        self._add(value)
        return children_of(value)

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
        held = getattr(value, "__dict__", {}).values()
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
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add_content(attributes)
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
                "through the network in setup(), or remove SanityCheck."
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

"""Restores objects after a block of code that must have no lasting effects.

A sanity check, a step that a process only repeats for others, and a forward that is computed again
each make a :class:`Backup` before, and restore it afterwards. Everything is restored in place, so
references to it stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator, load_generator, state_of_generator
from helios.core.memory import storage_bytes, storage_of
from helios.state.values import ATOMS, WITHOUT_ATTRIBUTES, children_of
from helios.storage.plain_objects import (
    OUTSIDE,
    RESOURCES,
    attributes_of,
    comes_from,
    content_of,
    delete_attribute,
    is_mutable,
    refill,
    set_attribute,
)

_OF_OTHERS = (
    *("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.distributed"),
    *("helios.trainer", "helios.start", "helios.run_parts", "helios.run_state"),
    *("helios.loops", "helios.hooks"),
    *("helios.checkpoint", "helios.data.datamodule", "helios.state", "helios.sharding"),
)
"""Modules whose objects a model or plugin refers to without owning them."""

_LEFT_ALONE = (type, ModuleType, FunctionType, Enum, Dataset, DataLoader)


@final
class Backup:
    """A copy of some objects and everything that they refer to.

    It excludes data sets, loaders, classes, functions, loggers, sparse tensors, and objects with a
    thread, a lock, a queue, a file or a connection.

    Args:
        owners: the objects.
        leave: returns whether to exclude a value that is no owner, with everything that it refers
            to.
        on_host: whether copies of tensors are in host memory, which is larger.

    Attributes:
        values: the objects, and everything that they refer to, except what is excluded.
    """

    def __init__(
        self,
        owners: Iterable[object],
        *,
        leave: Callable[[Any], bool] = lambda value: False,
        on_host: bool = False,
    ) -> None:
        self.values: list[Any] = []
        self._on_host = on_host
        self._restores: list[Callable[[], object]] = []
        self._storages: set[tuple[torch.device, int]] = set()
        waiting = [*owners]
        of_owners = set(map(id, waiting))
        # Kept alive while ids are remembered: another object could get the same one.
        seen: dict[int, Any] = {}
        while waiting:
            value = waiting.pop()
            if type(value) in ATOMS or id(value) in seen:
                continue
            seen[id(value)] = value
            if id(value) in of_owners or not (leave(value) or _is_left_alone(value)):
                self.values.append(value)
                self._add(value)
                waiting += children_of(value)

    def restore(self) -> None:
        """Restore the objects; may be called again."""
        for restore in self._restores:
            restore()

    def _add(self, value: Any) -> None:
        add = self._restores.append
        if is_mutable(value):
            add(partial(refill, value, content_of(value)))
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            add(partial(np.copyto, value, value.copy()))
        elif is_generator(value):
            add(partial(load_generator, value, state_of_generator(value)))
        if type(value) not in WITHOUT_ATTRIBUTES:
            add(partial(_restore_attributes, value, attributes_of(value)))

    def _add_tensor(self, tensor: Tensor) -> None:
        add = self._restores.append
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        add(partial(setattr, tensor, "data", tensor.detach()))
        if tensor.is_leaf:
            add(partial(tensor.requires_grad_, tensor.requires_grad))
            add(partial(setattr, tensor, "grad", tensor.grad))
        place = (tensor.device, storage_of(tensor))
        # Views of the same memory are copied once, and elements that overlap.
        if place[1] and place not in self._storages:
            self._storages.add(place)
            whole = storage_bytes(tensor.detach())
            copied = whole.to("cpu", copy=True) if self._on_host else whole.clone()
            add(partial(_restore_bytes, whole, copied))


def _is_left_alone(value: Any) -> bool:
    if is_mutable(value) or isinstance(value, Tensor | nn.Module):
        return False
    if isinstance(value, _LEFT_ALONE) or comes_from(type(value), OUTSIDE):
        return True
    if any(base.__module__.startswith(_OF_OTHERS) for base in type(value).__mro__):
        return True
    held = attributes_of(value).values()
    return any(type(each).__module__.partition(".")[0] in RESOURCES for each in held)


def _restore_attributes(value: Any, before: dict[str, Any]) -> None:
    now = attributes_of(value)
    for name in now.keys() - before.keys():
        delete_attribute(value, name)
    for name, held in before.items():
        # Another thread may read those that have not changed.
        if name not in now or now[name] is not held:
            set_attribute(value, name, held)


def _restore_bytes(whole: Tensor, before: Tensor) -> None:
    # Memory that was mapped from a file may be read-only.
    if not (whole.is_cpu and torch.equal(whole, before)):
        whole.copy_(before)

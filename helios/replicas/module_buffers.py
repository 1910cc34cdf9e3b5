"""Exchanges buffers of networks, such as BatchNorm's averages, between several replicas.

Every replica begins an accumulation window with the committed buffers of replica 0 and updates its
own copy during the window. At the window's end those of replica 0 are committed everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.core.utils import foreach
from helios.replicas.replicas import NOTHING, Replicas, join_bytes, split_bytes

Values: TypeAlias = list[Tensor | None]
_Shape: TypeAlias = tuple[torch.Size, torch.dtype] | None


@final
class Buffers:
    """The buffers of networks, including those that are not saved.

    Args:
        networks: the networks; buffers that are still lazy are left out.
    """

    def __init__(self, networks: Iterable[nn.Module] = ()) -> None:
        parts = {id(part): part for network in networks for part in network.modules()}
        # Buffers that are None count: they may hold a tensor later.
        self._places = [
            (table, name)
            for table in map(_table_of, parts.values())
            for name, buffer in table.items()
            if not is_lazy(buffer)
        ]

    def present(self) -> Values:
        """Return the buffers as they are."""
        return [table.get(name) for table, name in self._places]

    def copies(self) -> Values:
        """Return copies of the buffers."""
        present = self.present()
        found = [each if each is None else torch.empty_like(each) for each in present]
        _copy(present, found)
        return found

    def put(self, values: Values) -> None:
        """Copy values into the buffers; a buffer of another shape becomes a new tensor."""
        targets = [*map(_target_for, values, self.present())]
        _copy(values, targets)
        for (table, name), target in zip(self._places, targets, strict=True):
            table[name] = target


@final
class ReplicaBuffers:
    """Exchanges the buffers of networks between the turns of replicas.

    Args:
        replicas: the replicas of the run.

    Attributes:
        is_exchanged: whether there are buffers, and this process runs several replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.is_exchanged = False
        self._replicas = replicas
        self._buffers = Buffers()
        self._committed: Values | None = None
        self._own: dict[int, Values] = {}
        self._shapes: list[_Shape] = []

    def find(self, networks: Iterable[nn.Module]) -> None:
        """Find the buffers of networks, including those that are not saved."""
        self._buffers = Buffers(networks)
        self.is_exchanged = len(self._replicas.local_replicas) > 1 and bool(self._buffers.present())

    def begin_window(self) -> None:
        """Copy the committed buffers, before the first replica's first micro-batch."""
        self._own.clear()
        self._committed = self._buffers.copies() if self.is_exchanged else None

    def enter(self, replica: int) -> None:
        """Put a replica's buffers of the window in place, or else the committed ones."""
        values = self._own.get(replica, self._committed)
        if values is not None:
            self._buffers.put(values)

    def leave(self, replica: int) -> None:
        """Keep the buffers of a replica at the end of its turn."""
        if self.is_exchanged:
            self._own[replica] = self._buffers.copies()

    def commit(self) -> None:
        """Put replica 0's buffers in place at a window's end, if this process runs it."""
        if 0 in self._own:
            self._buffers.put(self._own[0])
        self._own.clear()
        self._committed = None

    def exchange(self) -> None:
        """Receive the buffers of rank 0 in a separate message, after :meth:`commit`."""
        if self._replicas.has_single_process:
            return
        has_changed, content = self.write()
        self._replicas.send((has_changed,), None, content)
        received = self._replicas.receive()
        self.read(received.content, has_changed=received.flags[0])

    def write(self) -> tuple[bool, Tensor]:
        """Return what :meth:`read` needs on all processes, after :meth:`commit`.

        Returns:
            Whether the shapes differ from those that all processes know, and the bytes of the
            buffers. Only those of rank 0, which runs replica 0, count: others return a buffer of
            the same size.
        """
        has_changed = list(map(_shape_of, self._buffers.present())) != self._shapes
        if not self._travels:
            return has_changed, NOTHING
        if has_changed or self._replicas.rank:
            return has_changed, torch.empty(_count_bytes(self._shapes), dtype=torch.uint8)
        return has_changed, join_bytes(_tensors_in(self._buffers.present()))

    def read(self, content: Tensor, *, has_changed: bool) -> None:
        """Copy the buffers of rank 0 into those of this process, after a window's last backward.

        Args:
            content: the bytes of rank 0.
            has_changed: whether any process has shapes that the others do not know.
        """
        replicas = self._replicas
        if has_changed:
            self._learn_shapes()
        if has_changed or not self._travels:
            replicas.copy_from_first(_tensors_in(self._buffers.present()))
        elif replicas.rank:
            split_bytes(content, _tensors_in(self._buffers.present()))

    @property
    def _travels(self) -> bool:
        """Whether the bytes are sent with the window's message, which is on the CPU."""
        return self._replicas.device.type == "cpu"

    def _learn_shapes(self) -> None:
        replicas, values = self._replicas, self._buffers.present()
        self._shapes = replicas.gather_objects(list(map(_shape_of, values)))[0]
        for place, shape in enumerate(self._shapes):
            if _shape_of(values[place]) != shape:
                values[place] = (
                    None
                    if shape is None
                    else torch.empty(shape[0], dtype=shape[1], device=replicas.device)
                )
        self._buffers.put(values)


def _target_for(value: Tensor | None, present: Tensor | None) -> Tensor | None:
    if value is None or _shape_of(value) == _shape_of(present):
        return value if value is None else present
    return torch.empty_like(value)


def _copy(sources: Values, targets: Values) -> None:
    foreach("copy", _tensors_in(targets), _tensors_in(sources))


def _tensors_in(values: Values) -> list[Tensor]:
    return [value for value in values if value is not None]


def _table_of(part: nn.Module) -> dict[str, Any]:
    table: Any = vars(part)["_buffers"]
    # Of a scripted module, whose table is no dict, only values can be put back.
    return table if isinstance(table, dict) else dict(table.items())


def _shape_of(value: Tensor | None) -> _Shape:
    return None if value is None else (value.shape, value.dtype)


def _count_bytes(shapes: Iterable[_Shape]) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in filter(None, shapes))

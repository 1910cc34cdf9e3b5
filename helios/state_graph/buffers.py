"""Copies the buffers of networks, such as BatchNorm's averages, and puts them back.

The networks are walked once; then only a flat list of tensors is copied, in each window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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

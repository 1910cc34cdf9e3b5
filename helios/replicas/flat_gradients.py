"""Keeps gradients in flat buffers: one tensor per type and device, with a view per parameter.

Each leaf of the summation tree is such a buffer. After the gradients it has one mark per parameter,
1 if the parameter has a gradient. The marks are summed with the gradients, so all processes know
which gradients are missing everywhere without another exchange.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from helios.core.memory import fills_its_reach
from helios.core.utils import foreach
from helios.errors import UsageError
from helios.replicas.tree_reducer import TreeReducer

# In elements: views that begin at multiples of 16 bytes stay aligned for vectorized kernels.
_ALIGNMENT = 16


@dataclasses.dataclass(eq=False)
class FlatBuffer:
    """Gradients of one replica, or summed over several.

    Attributes:
        flats: one tensor of one dimension for each type and device: gradients, then marks.
        views: by number of the parameter, in its shape, into ``flats``.
        missing: numbers of the parameters without a gradient, as far as this process knows.
    """

    flats: list[Tensor]
    views: dict[int, Tensor]
    missing: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Consecutive parameters whose gradients are sent together.

    Attributes:
        group: number of the flat tensor.
        part: the slice of that tensor.
        numbers: numbers of the parameters.
        device: the device of the tensor.
    """

    group: int
    part: slice
    numbers: tuple[int, ...]
    device: torch.device


@dataclasses.dataclass(frozen=True)
class _Group:
    """The parameters of one type and device, and their offsets in the flat tensor."""

    offsets: dict[int, int]
    num_elements: int
    kind: tuple[torch.dtype, torch.device]


def _view_like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    part = flat[offset : offset + parameter.numel()]
    # Optimizers are fast if gradients have the strides of their parameters.
    if fills_its_reach(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


class FlatGradients:
    """Moves gradients into flat buffers and back, and keeps the buffers for the next step.

    The buffers hold the parameters that require gradients when a window's first gradients are
    collected. Frozen parameters cost nothing, and unfreezing them is noticed.

    Args:
        named_parameters: all parameters with their names for messages, each parameter once.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        for name, parameter in named_parameters:
            self._names.append(name)
            self._parameters.append(parameter)
        self._trained: list[int] = []
        self._forms: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]] = []
        self._groups: list[_Group] = []
        self._is_agreed = False
        self._free: list[FlatBuffer] = []
        self._num_reserved = 0
        self._shown: FlatBuffer | None = None

    def move_all(self, buffer: FlatBuffer | None = None) -> FlatBuffer:
        """Move the gradients of a backward into a buffer. ``.grad`` is None afterwards.

        Args:
            buffer: the buffer that the replica's gradients of the window are added to; ``None``
                for the window's first micro-batch.

        Raises:
            UsageError: if a gradient is sparse or its type is not that of its parameter, or if a
                parameter was unfrozen within a window.
        """
        self._check_layout()
        parameters, found = self._parameters, dict[int, Tensor]()
        for number in self._trained:
            gradient = parameters[number].grad
            if gradient is None:
                continue
            has_type = gradient.dtype is parameters[number].dtype
            if gradient.layout is not torch.strided or not has_type:
                raise self._make_gradient_error(number, gradient)
            found[number] = gradient
        missing = set(self._trained).difference(found)
        is_first = buffer is None
        if buffer is None:
            buffer = self._reserve()
        views = list(map(buffer.views.__getitem__, found))
        foreach("copy" if is_first else "add", views, list(found.values()))
        self.mark(buffer, missing, is_first=is_first)
        for number in found:
            parameters[number].grad = None
        return buffer

    def open_leaf(self, buffer: FlatBuffer | None) -> FlatBuffer:
        """Return the buffer for a backward whose gradients are moved one at a time."""
        self._check_layout()
        return self._reserve() if buffer is None else buffer

    def trained(self) -> list[tuple[int, Tensor]]:
        return [(number, self._parameters[number]) for number in self._trained]

    def name_of(self, number: int) -> str:
        return self._names[number]

    def move(self, number: int, buffer: FlatBuffer, *, is_first: bool) -> None:
        """Move one gradient into a buffer. ``.grad`` is None afterwards.

        Args:
            number: number of the parameter.
            buffer: the replica's buffer.
            is_first: whether this is the window's first micro-batch, which overwrites the buffer.

        Raises:
            UsageError: as :meth:`move_all` does.
        """
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
            raise self._make_gradient_error(number, gradient)
        with torch.no_grad():
            if is_first:
                buffer.views[number].copy_(gradient)
            else:
                buffer.views[number].add_(gradient)
        parameter.grad = None

    def buckets(self, num_bytes: int) -> list[Bucket]:
        """Return buckets of at least ``num_bytes`` bytes, the last parameters first."""
        self._check_layout()
        found = []
        for place, group in enumerate(self._groups):
            dtype, device = group.kind
            numbers: list[int] = []
            stop = group.num_elements
            for number, offset in reversed(group.offsets.items()):
                numbers.append(number)
                if (stop - offset) * dtype.itemsize >= num_bytes or offset == 0:
                    found.append(Bucket(place, slice(offset, stop), tuple(numbers), device))
                    numbers, stop = [], offset
        return sorted(found, key=lambda bucket: -max(bucket.numbers))

    def _check_layout(self) -> None:
        trained, forms = list[int](), list[Any]()
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                trained.append(number)
                forms.append((parameter.dtype, parameter.shape, parameter.stride()))
        if self._num_reserved == 0:
            if trained == self._trained and forms == self._forms:
                return
            self._trained, self._forms = trained, forms
            self._groups = self._make_groups()
            self._free, self._shown, self._is_agreed = [], None, False
        elif thawed := set(trained).difference(self._trained):
            names = [self._names[number] for number in sorted(thawed)]
            raise UsageError(
                f"requires_grad of {names} was changed within an accumulation window. Change it "
                f"in on_training_step_start."
            )

    def _make_groups(self) -> list[_Group]:
        offsets: dict[tuple[torch.dtype, torch.device], dict[int, int]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for number in self._trained:
            parameter = self._parameters[number]
            kind = (parameter.dtype, parameter.device)
            size = sizes.get(kind, 0)
            offsets.setdefault(kind, {})[number] = size
            sizes[kind] = size + math.ceil(parameter.numel() / _ALIGNMENT) * _ALIGNMENT
        return [_Group(offsets[kind], sizes[kind], kind) for kind in offsets]

    def _make_gradient_error(self, number: int, gradient: Tensor) -> UsageError:
        name, dtype = self._names[number], self._parameters[number].dtype
        if gradient.layout is not torch.strided:
            return UsageError(
                f"The gradient of {name!r} must be dense when several replicas are summed, got "
                f"{gradient.layout}. Build the layer with sparse=False, or use num_replicas=1."
            )
        return UsageError(
            f"The gradient of {name!r} must have the type of its parameter, {dtype}, when "
            f"several replicas are summed, got {gradient.dtype}. Use num_replicas=1."
        )

    def _reserve(self) -> FlatBuffer:
        if self._shown is not None:
            self._free.append(self._shown)
            self._shown = None
        self._num_reserved += 1
        return self._free.pop() if self._free else self._make_buffer()

    def _release(self, buffer: FlatBuffer) -> None:
        self._num_reserved -= 1
        self._free.append(buffer)

    def _make_buffer(self) -> FlatBuffer:
        buffer = FlatBuffer([], {})
        for group in self._groups:
            dtype, device = group.kind
            size = group.num_elements + len(group.offsets)
            flat = torch.zeros(size, dtype=dtype, device=device)
            buffer.flats.append(flat)
            for number, offset in group.offsets.items():
                buffer.views[number] = _view_like(self._parameters[number], flat, offset)
        return buffer

    def mark(self, buffer: FlatBuffer, missing: set[int], *, is_first: bool) -> None:
        """Mark which gradients are present. A missing one counts as +0.0."""
        if is_first:
            for number in missing:
                buffer.views[number].zero_()
        now_missing = missing if is_first else buffer.missing & missing
        if is_first or now_missing != buffer.missing:
            for group, flat in zip(self._groups, buffer.flats, strict=True):
                marks = flat[group.num_elements :]
                if now_missing.isdisjoint(group.offsets):
                    marks.fill_(1)
                else:
                    present = [float(number not in now_missing) for number in group.offsets]
                    marks.copy_(torch.tensor(present))
        buffer.missing = now_missing

    def add(self, left: FlatBuffer, right: FlatBuffer, *, only_marks: bool = False) -> FlatBuffer:
        """Add the right buffer to the left one and release it; the ``add`` of a TreeStack.

        Args:
            left: is changed.
            right: is free to be reused afterwards.
            only_marks: whether the gradients are summed already.
        """
        for number, (kept, added) in enumerate(zip(left.flats, right.flats, strict=True)):
            begin = self._groups[number].num_elements if only_marks else 0
            kept[begin:].add_(added[begin:])
        left.missing = left.missing & right.missing
        self._release(right)
        return left

    def agree(self, reducer: TreeReducer) -> None:
        """Check, once, that all processes train the same parameters.

        Raises:
            UsageError: if they do not.
        """
        if not self._is_agreed:
            reducer.check_equal("parameters", self._describe())
            self._is_agreed = True

    def reduce(
        self, sums: Mapping[range, FlatBuffer], reducer: TreeReducer, *, only_marks: bool = False
    ) -> FlatBuffer:
        """Add the buffers of all processes. All of them call it, once per window.

        Args:
            sums: the buffer of each subtree of this process, from its TreeStack.
            reducer: adds over processes.
            only_marks: whether the gradients are summed already.

        Raises:
            UsageError: if the processes train different parameters.
        """
        if not self._is_agreed:
            self.agree(reducer)
        first, *others = map(sums.__getitem__, reducer.nodes)
        for number, group in enumerate(self._groups if reducer.has_others else ()):
            begin = group.num_elements if only_marks else 0
            reducer.all_reduce({node: b.flats[number][begin:] for node, b in sums.items()})
        for buffer in others:
            first.missing = first.missing & buffer.missing
            self._release(buffer)
        return first

    def _describe(self) -> list[str]:
        pairs = [(self._names[number], self._parameters[number]) for number in self._trained]
        return [f"{name} of shape {tuple(p.shape)}, {p.dtype}" for name, p in pairs]

    def set_gradients(self, total: FlatBuffer) -> None:
        """Set ``.grad`` to views of a sum, or to None if no replica has a gradient.

        The views are valid until the next ``move_all``, which reuses the buffer.
        """
        nowhere = self._missing_everywhere(total) if total.missing else ()
        for number, view in total.views.items():
            self._parameters[number].grad = None if number in nowhere else view
        self._num_reserved -= 1
        self._shown = total

    def _missing_everywhere(self, total: FlatBuffer) -> set[int]:
        nowhere: set[int] = set()
        for group, flat in zip(self._groups, total.flats, strict=True):
            if not total.missing.isdisjoint(group.offsets):
                marks = flat[group.num_elements :].tolist()
                sums = zip(group.offsets, marks, strict=True)
                nowhere.update(number for number, mark in sums if mark == 0)
        return nowhere

"""Gradients in flat buffers: one tensor for each type and device, with a view of each parameter.

A leaf of the tree is such a buffer. Behind the gradients stands one element for each parameter, 1
where it has a gradient; these marks are added along with everything else, so all processes know
which gradients are missing everywhere, and no exchange of its own is needed for it (DESIGN R3).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from helios.core.memory import fills_its_reach
from helios.errors import UsageError
from helios.replicas.tree_reducer import TreeReducer

# In elements: views that begin at multiples of 16 bytes keep vectorised kernels.
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
    """A run of parameters whose gradients are sent together.

    Attributes:
        group: number of the flat tensor.
        part: their place in it.
        numbers: of the parameters.
        device: where they lie.
    """

    group: int
    part: slice
    numbers: tuple[int, ...]
    device: torch.device


@dataclasses.dataclass(frozen=True)
class _Group:
    """The parameters of one type and device, and where each begins in their flat tensor."""

    offsets: dict[int, int]
    num_elements: int
    kind: tuple[torch.dtype, torch.device]

    def marks(self, flat: Tensor) -> Tensor:
        return flat[self.num_elements :]


def _view_like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    part = flat[offset : offset + parameter.numel()]
    # Optimizers are fast where gradients lie as their parameters do.
    if fills_its_reach(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


class FlatGradients:
    """Moves gradients into flat buffers and back, and keeps the buffers for the next step.

    The buffers hold what requires gradients when a window's first gradients are collected, so
    frozen parameters cost nothing, and thawing them is noticed.

    Args:
        named_parameters: all parameters, with the names for messages; each of them once.
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
        self._num_taken = 0
        self._shown: FlatBuffer | None = None

    def collect(self, buffer: FlatBuffer | None = None) -> FlatBuffer:
        """Move the gradients of a backward into a buffer; ``.grad`` is None after it.

        Args:
            buffer: what this replica has collected in the window, and gets the gradients added;
                ``None`` for the window's first micro-batch.

        Raises:
            UsageError: for a gradient that is sparse or has another type than its parameter, and
                for a parameter that was thawed inside of a window.
        """
        self._check_layout()
        parameters = self._parameters
        found = {n: g for n in self._trained if (g := parameters[n].grad) is not None}
        for number, gradient in found.items():
            is_alike = gradient.dtype is parameters[number].dtype
            if gradient.layout is not torch.strided or not is_alike:
                raise self._make_gradient_error(number, gradient)
        missing = set(self._trained).difference(found)
        is_first = buffer is None
        if buffer is None:
            buffer = self._take()
        if found:
            views = [buffer.views[number] for number in found]
            move = torch._foreach_copy_ if is_first else torch._foreach_add_
            with torch.no_grad():
                move(views, list(found.values()))
        self.mark(buffer, missing, is_first=is_first)
        for number in found:
            parameters[number].grad = None
        return buffer

    def open_leaf(self, buffer: FlatBuffer | None) -> FlatBuffer:
        """Return the buffer for a backward whose gradients are moved one by one."""
        self._check_layout()
        return self._take() if buffer is None else buffer

    def trained(self) -> list[tuple[int, Tensor]]:
        """Return the numbers and parameters that are trained."""
        return [(number, self._parameters[number]) for number in self._trained]

    def name_of(self, number: int) -> str:
        """Return how messages call a parameter."""
        return self._names[number]

    def move(self, number: int, buffer: FlatBuffer, *, is_first: bool) -> None:
        """Move one gradient into a buffer; ``.grad`` is None after it.

        Args:
            number: of the parameter.
            buffer: the replica's.
            is_first: whether it is the window's first micro-batch, so that nothing is added up.

        Raises:
            UsageError: as :meth:`collect` does.
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
        """Return runs of parameters of at least so many bytes, the last parameters first."""
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
        trained = [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]
        if self._num_taken == 0:
            forms = [(p.dtype, p.shape, p.stride()) for p in self._parameters if p.requires_grad]
            if trained == self._trained and forms == self._forms:
                return
            self._trained, self._forms = trained, forms
            self._groups = self._make_groups()
            self._free, self._shown, self._is_agreed = [], None, False
        elif thawed := set(trained).difference(self._trained):
            names = [self._names[number] for number in sorted(thawed)]
            raise UsageError(
                f"requires_grad must be set between two steps, and was set inside of one for "
                f"{names}. Set it in on_training_step_start."
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
                f"The gradient of {name!r} must be dense where several replicas are added, got "
                f"{gradient.layout}. Build the layer with sparse=False, or use num_replicas=1."
            )
        return UsageError(
            f"The gradient of {name!r} must have the type of its parameter, {dtype}, where "
            f"several replicas are added, got {gradient.dtype}. Use num_replicas=1."
        )

    def _take(self) -> FlatBuffer:
        if self._shown is not None:
            self._free.append(self._shown)
            self._shown = None
        self._num_taken += 1
        return self._free.pop() if self._free else self._make_buffer()

    def _give_back(self, buffer: FlatBuffer) -> None:
        self._num_taken -= 1
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
        """Note which gradients are there; a missing one counts as +0.0."""
        if is_first:
            for number in missing:
                buffer.views[number].zero_()
        now_missing = missing if is_first else buffer.missing & missing
        if is_first or now_missing != buffer.missing:
            for group, flat in zip(self._groups, buffer.flats, strict=True):
                marks = group.marks(flat)
                if now_missing.isdisjoint(group.offsets):
                    marks.fill_(1)
                else:
                    present = [float(number not in now_missing) for number in group.offsets]
                    marks.copy_(torch.tensor(present))
        buffer.missing = now_missing

    def add(self, left: FlatBuffer, right: FlatBuffer, *, only_marks: bool = False) -> FlatBuffer:
        """Add a buffer into the left one and keep the right one for later; for a TreeStack.

        Args:
            left: is changed.
            right: is free after it.
            only_marks: whether the gradients were added before.
        """
        for number, (kept, added) in enumerate(zip(left.flats, right.flats, strict=True)):
            begin = self._groups[number].num_elements if only_marks else 0
            kept[begin:].add_(added[begin:])
        left.missing = left.missing & right.missing
        self._give_back(right)
        return left

    def agree(self, reducer: TreeReducer) -> None:
        """Check once that all processes train the same parameters.

        Raises:
            UsageError: if they do not.
        """
        if not self._is_agreed:
            reducer.check_equal("parameters", self._describe())
            self._is_agreed = True

    def reduce(
        self, sums: Mapping[range, FlatBuffer], reducer: TreeReducer, *, only_marks: bool = False
    ) -> FlatBuffer:
        """Add the buffers of all processes; all of them call it, once a window.

        Args:
            sums: the buffer of each subtree of this process, from its TreeStack.
            reducer: adds over processes.
            only_marks: whether the gradients were added before.

        Raises:
            UsageError: if the processes train different parameters.
        """
        if not self._is_agreed:
            self.agree(reducer)
        first, *others = map(sums.__getitem__, reducer.nodes)
        for number, group in enumerate(self._groups):
            begin = group.num_elements if only_marks else 0
            reducer.all_reduce({node: b.flats[number][begin:] for node, b in sums.items()})
        for buffer in others:
            first.missing = first.missing & buffer.missing
            self._give_back(buffer)
        return first

    def _describe(self) -> list[str]:
        pairs = [(self._names[number], self._parameters[number]) for number in self._trained]
        return [f"{name} of shape {tuple(p.shape)}, {p.dtype}" for name, p in pairs]

    def show(self, total: FlatBuffer) -> None:
        """Let ``.grad`` be views of a sum; None where no replica of any process has a gradient.

        The views hold until the next ``collect``, which uses the buffer again.
        """
        nowhere = self._missing_everywhere(total) if total.missing else ()
        for number, view in total.views.items():
            self._parameters[number].grad = None if number in nowhere else view
        self._num_taken -= 1
        self._shown = total

    def _missing_everywhere(self, total: FlatBuffer) -> set[int]:
        nowhere: set[int] = set()
        for group, flat in zip(self._groups, total.flats, strict=True):
            if not total.missing.isdisjoint(group.offsets):
                sums = zip(group.offsets, group.marks(flat).tolist(), strict=True)
                nowhere.update(number for number, mark in sums if mark == 0)
        return nowhere

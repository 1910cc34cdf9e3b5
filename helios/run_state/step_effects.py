"""Finds what a training step changes besides gradients and buffers.

Gradients and buffers are summed and exchanged. Any other change depends on how many replicas a
process runs, so it is searched for in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import state_of_generator
from helios.protocols import Stateful
from helios.run_state.class_attributes import class_marks
from helios.run_state.owner_scan import OwnerScan
from helios.run_state.plain_values import Identities
from helios.run_state.state_dict_coverage import Coverage
from helios.run_state.value_scan import look_at
from helios.run_state.walk_result import Slot, WalkResult
from helios.storage.checksums import bit_sum


@final
class StepWatch:
    """Compares what a model holds before and after a step.

    Args:
        owner: the model.
        look: returns what it holds now.
        identities: numbers for values that cannot be pickled.
        reads_weights: whether to notice writes to ``parameter.data`` too, which requires reading
            all weights.
    """

    def __init__(
        self,
        owner: object,
        look: Callable[[], OwnerScan],
        identities: Identities,
        *,
        reads_weights: bool,
    ) -> None:
        self._owner = owner
        self._look = look
        self._identities = identities
        self._reads_weights = reads_weights
        self._before = self._take()

    def changed(self, *, counts_parameters: bool = True) -> list[str]:
        """Return the paths of what has changed since this object was created.

        Args:
            counts_parameters: whether to include parameters that were written to.
        """
        before, after = (
            marks | moved if counts_parameters else marks
            for marks, moved in (self._before, self._take())
        )
        found = {path for path in before | after if before.get(path) != after.get(path)}
        # The path of an attribute is more precise than that of its object.
        holders = {path[:end] for path in found for end, mark in enumerate(path) if mark == "."}
        return sorted(found - holders)

    def _take(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return marks of values and of parameters, by path."""
        scene = self._look()
        found = scene.found
        marks = class_marks(self._owner, found, scene, self._identities)
        # A manual step updates optimizers and schedulers, as it updates parameters.
        moved = {
            name: mark_of_tensor(tensor, reads_bits=self._reads_weights)
            for name, tensor in (scene.parameters.named() | scene.parameters.loose).items()
        }
        covers: dict[str, Coverage] = {}
        for path, part in (*found.objects.items(), *found.inner.items()):
            if not isinstance(part, nn.Module):
                state = _try_state(part)
                # The state of a scheduler is its attributes, so these are reported.
                if not isinstance(part, LRScheduler):
                    covers[f"{path}/"] = Coverage(state, lambda value: self._mark_of(value, scene))
                # The state of an optimizer results from its updates.
                if not isinstance(part, Optimizer):
                    table = moved if isinstance(part, LRScheduler) else marks
                    table[path] = self._mark_of(state, scene)
        for slot in found.slots.values():
            cover = covers.get(slot.parent)
            is_known = cover is not None and cover.has(slot.key, slot.value)
            # The position of an iterator is unknown: it would differ at every comparison.
            if not (is_known or _is_buffer(slot, found) or isinstance(slot.value, Iterator)):
                table = moved if _is_of_updates(slot, found) else marks
                table[slot.path] = self._mark_of(slot.value, scene)
        for path, generator in found.generators.items():
            marks[path] = self._mark_of(state_of_generator(generator), scene)
        return marks, moved

    def _mark_of(self, value: Any, scene: OwnerScan) -> bytes:
        return look_at(value, scene, self._identities).mark


def _try_state(part: Stateful) -> dict[str, Any]:
    try:
        return part.state_dict()
    except Exception:  # user code, which may need a first step
        return {}


def _is_of_updates(slot: Slot, found: WalkResult) -> bool:
    """Return whether a slot is an attribute of an optimizer or a scheduler."""
    holder = found.objects.get(slot.parent.rstrip("/")) if slot.parent.endswith("/") else None
    return isinstance(holder, Optimizer | LRScheduler)


def _is_buffer(slot: Slot, found: WalkResult) -> bool:
    container = found.containers.get(slot.parent)
    # named_buffers() leaves out buffers that are None, whose first tensor comes in the step.
    return isinstance(container, nn.Module) and slot.key in vars(container)["_buffers"]


def mark_of_tensor(parameter: Tensor, *, reads_bits: bool) -> bytes:
    """Return a mark that differs after a write; writes to ``.data`` do not change the version.

    Of a sparse tensor, which has no memory of its own, they are not seen.
    """
    is_dense = parameter.layout is torch.strided
    return b"%d %d %d" % (
        parameter._version,  # noqa: SLF001 - torch has no public counter
        parameter.data_ptr() if is_dense else 0,
        int(bit_sum(parameter)) if reads_bits and is_dense else 0,
    )

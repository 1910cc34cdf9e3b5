"""What a training step changes besides gradients and buffers: several replicas would each do it.

Gradients and buffers are summed and exchanged. Anything else that a step changes depends on how
many replicas a process carries, so it is found once, at the first step (DESIGN R3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.run_state.bits import bit_sum
from helios.run_state.look import look_at
from helios.run_state.parts import parameters_of
from helios.run_state.values import Identities, Surroundings
from helios.run_state.walk import Found, Slot


class Scene(Surroundings, Protocol):
    """What a model holds at a moment, and what lies around it."""

    @property
    def found(self) -> Found:
        """What it holds."""
        ...


@final
class StepWatch:
    """Compares what a model holds before and after a step.

    Args:
        look: returns what is there now, and what is saved on its own account.
        identities: numbers for what cannot be pickled.
        reads_weights: whether to see what is written to ``parameter.data`` too, for which all
            weights are read.
    """

    def __init__(
        self, look: Callable[[], Scene], identities: Identities, *, reads_weights: bool
    ) -> None:
        self._look = look
        self._identities = identities
        self._reads_weights = reads_weights
        self._before = self._take()

    def changed(self, *, counts_parameters: bool = True) -> list[str]:
        """Return the paths of what has changed since this object was made.

        Args:
            counts_parameters: whether a parameter that was written to counts.
        """
        (values, versions), (values_now, versions_now) = self._before, self._take()
        before, after = values, values_now
        if counts_parameters:
            before, after = before | versions, after | versions_now
        return sorted(path for path in before | after if before.get(path) != after.get(path))

    def _take(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return marks of values and of parameters, by path."""
        surroundings = self._look()
        found = surroundings.found
        marks: dict[str, bytes] = {}
        for slot in found.slots.values():
            if slot.is_settable and not _is_buffer(slot, found):
                look = look_at(slot.value, surroundings, self._identities)
                if look.is_plain:
                    marks[slot.path] = look.mark
        parameters = parameters_of(found)
        moved = {
            name: _mark_of(tensor, reads_bits=self._reads_weights)
            for name, tensor in (parameters.named() | parameters.loose).items()
        }
        for path, part in found.objects.items():
            if not isinstance(part, nn.Module | Optimizer):
                state = part.state_dict()
                look = look_at(state, surroundings, self._identities)
                # A manual step moves its schedulers, as it moves parameters.
                table = moved if isinstance(part, LRScheduler) else marks
                table[path] = look.mark
        return marks, moved


def _is_buffer(slot: Slot, found: Found) -> bool:
    container = found.containers.get(slot.parent)
    # named_buffers() leaves out those that are None, and get their first tensor in the step.
    return isinstance(container, nn.Module) and slot.key in vars(container)["_buffers"]


def _mark_of(parameter: Tensor, *, reads_bits: bool) -> bytes:
    """Return what differs after a parameter was written to; ``.data`` counts no version."""
    return b"%d %d %d" % (
        parameter._version,  # noqa: SLF001 - torch has no public counter
        parameter.data_ptr(),
        int(bit_sum(parameter)) if reads_bits else 0,
    )

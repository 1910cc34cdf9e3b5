"""Protocols for objects with state, for clocks, and for audits of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from helios.state import TrainingState

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that :meth:`state_dict` returned."""
        ...


Clock: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds; an argument, so that tests need not sleep."""


class GradientAudit(Protocol):
    """Computes gradients a second time in some steps; see :mod:`helios.audit.step_audit`."""

    def if_due(self) -> GradientAudit | None:
        """Return this object in an audited iteration, else ``None``; on all processes alike."""
        ...

    def take_step(self, session: Any, step: str, batch: Any, state: TrainingState) -> Any:
        """Run the step of a replica in an audited iteration; returns what it returned."""
        ...

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None) -> None:
        """Do backward of a replica in an audited iteration."""
        ...

    def end_backward(self) -> None:
        """Compute a gradient again after the last backward of this process, and compare it."""
        ...

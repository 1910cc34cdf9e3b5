"""Protocols for objects with state, for clocks, and for recorders of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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


class Clock(Protocol):
    """A monotonic clock in seconds; an argument, so that tests need not sleep."""

    def __call__(self) -> float:
        """Return the current time in seconds."""
        ...


class Ledger(Protocol):
    """Notes what each iteration was; see :mod:`helios.ledger.writer`."""

    @property
    def is_full(self) -> bool:
        """Whether generators and gradients are noted, too."""
        ...

    def see(
        self,
        batches: Sequence[Any],
        indices: Sequence[Any] | None,
        contents: Sequence[Any] | None,
    ) -> Sequence[float]:
        """Note the batches of an iteration; returns numbers to add over all processes."""
        ...

    def begin_turn(self, iteration: int) -> None:
        """Note the generators before the step of the next replica of this process."""
        ...

    def take_gradients(self, optimizer: Any) -> None:
        """Note the averaged gradients of an optimizer, before they are clipped."""
        ...

    def find_optimizers(self) -> None:
        """Search for the optimizers again."""
        ...

    def take_losses(self, losses: Mapping[str, Any]) -> None:
        """Read the losses of an iteration, before the events of its end."""
        ...

    def write(self, state: TrainingState, totals: Sequence[float], *, norm: Any = None) -> None:
        """Write the line of an iteration, at its end."""
        ...

    def end(self, state: TrainingState) -> None:
        """Write the last line of a run that has ended."""
        ...


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


class Recorder(Protocol):
    """Writes the results of a run: checkpoints and scalars."""

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; ``None`` if the run has none."""
        ...

    def save(self, snapshot: dict[str, Any]) -> None:
        """Write a snapshot as a checkpoint, unless it is committed already."""
        ...

    def has_saved(self, state: TrainingState) -> bool:
        """Whether the checkpoint of this iteration is committed."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed in this process so that the training must end."""
        ...

    def raise_failure(self) -> None:
        """Raise the error of a failed save in all processes; all call it at the same point."""
        ...

    @property
    def logs_scalars(self) -> bool:
        """Whether scalars are written."""
        ...

    def show_scores(
        self, scores: Mapping[str, float], state: TrainingState, *, has_improved: bool
    ) -> None:
        """Log the scores of a validation, by name."""
        ...

    def note_mismatch(self, text: str, hosts: Sequence[str]) -> None:
        """Record what an audit has found, and on which hosts."""
        ...

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write scalars of an iteration, by name."""
        ...

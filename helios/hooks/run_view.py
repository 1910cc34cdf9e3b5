"""``RunView``: the members of a session that a context reads and calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from helios.engines.engine import Engine
from helios.replicas.replicas import Replicas
from helios.replicas.turns import Turns
from helios.schedule import Schedule
from helios.state import Cursor, Phase, TrainingState

if TYPE_CHECKING:
    from helios import Model


class RunView(Protocol):
    """The members of a session that a context reads and calls."""

    model: Model
    engine: Engine
    state: TrainingState
    cursor: Cursor
    schedule: Schedule
    phase: Phase
    is_sanity_check: bool
    num_skipped_batches: int
    can_save: bool
    turns: Turns

    @property
    def replicas(self) -> Replicas:
        """The replicas of the run, and which process runs which."""
        ...

    @property
    def is_in_epoch(self) -> bool:
        """Whether the run resumes inside an epoch."""
        ...

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted at the next safe point."""
        ...

    @property
    def is_manual_mode(self) -> bool:
        """Whether the model steps its optimizers itself."""
        ...

    def find_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers of the model."""
        ...

    def find_schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers of the model."""
        ...

    def find_loader(self) -> DataLoader[Any] | None:
        """Return the loader of the phase."""
        ...

    def indices_of(self, place: Cursor) -> list[Any] | None:
        """Return the indices of the samples of a training batch."""
        ...

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Log numbers by name."""
        ...

    def request_checkpoint(self) -> None:
        """Request a checkpoint."""
        ...

    def request_stop(self, reason: str) -> None:
        """Request the regular end."""
        ...

    def interrupt(self, reason: str) -> None:
        """Request an early return."""
        ...

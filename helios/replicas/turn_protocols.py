"""What running replicas in turn needs of a model, an engine and a watcher of steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from helios.replicas.gradients import FindNetworks


class _Networks(Protocol):
    def modules(self) -> dict[str, nn.Module]: ...


class TrainedModel(Protocol):
    """What turns read of a model: its losses of the current batch, and its networks, by name."""

    @property
    def loss_items(self) -> dict[str, Any]: ...
    @property
    def discovery(self) -> _Networks: ...


class StepWatcher(Protocol):
    """Watches what one step changes."""

    def conclude(self, *, is_manual: bool) -> None:
        """Record what has changed."""
        ...


class ReplicaWatcher(Protocol):
    """Watches what steps change apart from the state that each replica has of its own."""

    def begin(self, iteration: int) -> StepWatcher | None:
        """Begin to watch a step, or return ``None`` if it is not watched."""
        ...

    def report(self, iteration: int) -> None:
        """Report what was found in this iteration."""
        ...


class Collector(Protocol):
    """Collects gradients, as an engine does."""

    def collect_gradients(
        self,
        optimizer: Optimizer,
        replica: int,
        *,
        ends_window: bool,
        find_networks: FindNetworks = ...,
    ) -> None:
        """Take the gradients of a replica's backward."""
        ...

    def sending_gradients(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks = ...
    ) -> AbstractContextManager[None]:
        """Send gradients during the last backward of a window."""
        ...

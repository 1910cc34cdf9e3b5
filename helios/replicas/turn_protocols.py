"""What the turns of replicas ask of a model, of an engine and of who watches their steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from helios.replicas.gradients import FindNetworks


class _Networks(Protocol):
    def modules(self) -> dict[str, nn.Module]: ...


class TrainedModel(Protocol):
    """What turns see of a model: its losses of the present batch, and its networks, by name."""

    @property
    def loss_items(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def discovery(self) -> _Networks: ...  # noqa: D102


class StepWatcher(Protocol):
    """Sees what one step changes."""

    def conclude(self, *, is_manual: bool) -> None:
        """Note what has changed."""
        ...


class ReplicaWatcher(Protocol):
    """Sees what the steps of replicas change that is no replica's own."""

    def begin(self) -> StepWatcher | None:
        """Begin to watch a step; ``None`` where it is not watched."""
        ...

    def report(self) -> None:
        """Say what was found in this iteration."""
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
        """Send gradients while the last backward of a window goes on."""
        ...

"""Exchanges one message per accumulation window between processes, before its first gradients.

The message holds the losses of all replicas, the buffers of replica 0, and flags of the run. What
may still change after the gradients is not in it and is exchanged later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.replicas.module_buffers import ReplicaBuffers
from helios.replicas.replicas import NOTHING, Replicas
from helios.requests import Agreement


@final
class WindowExchange:
    """Sends and receives the message of a window.

    Args:
        replicas: the replicas of the run.
        agreement: sends and receives the flags of the run.

    Attributes:
        buffers: the buffers of the replicas.
    """

    def __init__(self, replicas: Replicas, agreement: Agreement) -> None:
        self.buffers = ReplicaBuffers(replicas)
        self._replicas = replicas
        self._agreement = agreement
        self._tables: list[dict[str, Any]] = []
        self._means: dict[str, Tensor] | None = None
        self._is_final = False
        self._shown: dict[str, Any] = {}

    def keep_losses(self, table: Mapping[str, Any]) -> None:
        """Keep a copy of the losses of a turn.

        Raises:
            UsageError: if they cannot be averaged.
        """
        # Another turn or a commit may change a tensor that the table holds.
        kept: dict[str, Any] = {}
        for name, loss in table.items():
            if isinstance(loss, tuple):
                kept[name] = loss
                continue
            is_tensor = isinstance(loss, Tensor)
            is_number = loss.numel() == 1 if is_tensor else isinstance(loss, int | float)
            if not is_number or (type(loss) is not Tensor and is_sharded(loss)):
                raise make_loss_error(name, loss)
            kept[name] = loss.detach().clone() if is_tensor else loss
        self._tables.append(kept)

    def reopen(self) -> None:
        """Begin the last turn of an iteration again: its losses differ from those sent."""
        del self._tables[len(self._replicas.local_replicas) - 1 :]
        self._means = None

    def send(self, table: Mapping[str, Any], *, is_before_update: bool) -> None:
        """End a window and send its message with the next sum of gradients.

        Args:
            table: the losses of the last turn.
            is_before_update: whether an update follows, with hooks that could change the losses.
        """
        # Losses arrive late from an accelerator, and the gradients must not wait for them.
        is_near = self._replicas.device.type == "cpu"
        has_losses = not is_before_update or self._agreement.keeps_losses
        if has_losses:
            self.keep_losses(table)
            self._is_final, self._shown = not is_before_update, dict(table)
        if self.buffers.is_exchanged:
            self.buffers.commit()
        is_alone = self._replicas.has_single_process
        has_changed, content = (False, NOTHING) if is_alone else self.buffers.write()
        flags = self._agreement.announce(is_before_update=is_before_update)
        losses = self._tables if has_losses and is_near else None
        self._replicas.send((has_changed, *flags), losses, content)

    def receive(self) -> None:
        """Receive the messages of all processes and put the buffers of replica 0 in place."""
        received = self._replicas.receive()
        has_changed, *flags = received.flags
        if not self._replicas.has_single_process:
            self.buffers.read(received.content, has_changed=has_changed)
        self._agreement.listen(flags)
        self._means = received.means
        if not self._is_final and not self._agreement.keeps_losses:
            # A new loop may change the losses: they are exchanged at the end.
            self.reopen()

    def drop_window(self) -> None:
        """End a window without an update, after its last iteration."""
        self.buffers.commit()
        self.buffers.exchange()

    def pop_means(self, table: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the mean losses of an iteration, and begin the next one.

        Args:
            table: the losses of the last turn, unless they were kept.

        Raises:
            UsageError: if the losses have changed since they were sent.
        """
        means, shown = self._means, self._shown
        if means is not None:
            is_same = [*map(id, table.values())] == [*map(id, shown.values())]
            if not is_same or [*table] != [*shown]:
                raise _make_change_error(table, shown)
        else:
            if len(self._tables) < len(self._replicas.local_replicas):
                self.keep_losses(table)
            means = self._replicas.mean_losses(self._tables)
        self._tables, self._means = [], None
        return means


def _make_change_error(table: Mapping[str, Any], shown: Mapping[str, Any]) -> UsageError:
    names = sorted(x for x in {**table, **shown} if table.get(x) is not shown.get(x))
    return UsageError(
        f"{names} in Model.loss_items changed after the losses of the window were sent with its "
        "gradients, outside of an event: in the step of an optimizer or a scheduler, or in a "
        "method marked with @asks_nothing. Change them in on_optimizer_step_end, and remove the "
        "@asks_nothing mark."
    )


def make_loss_error(name: str, loss: Any) -> UsageError:
    """Return the error for a loss of the model's table that cannot be averaged."""
    shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    remedy = "Keep it in an attribute of another name"
    if is_sharded(loss):
        shown = "one that was computed of shards, in an order that depends on the processes"
        remedy = "Compute it in the forward of the module that holds the parameters"
    return UsageError(
        f"Model.loss_items[{name!r}] must be a number or a tensor of one element, because it is "
        f"averaged over replicas, got {shown}. {remedy}."
    )

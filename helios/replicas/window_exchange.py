"""What processes tell each other once a window: one message, in front of its first gradients.

It holds the losses of all replicas, the buffers of replica 0, and flags of the run. What may still
change behind the gradients is not in it, and is asked for later on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from torch import Tensor

from helios.errors import UsageError
from helios.replicas.module_buffers import ReplicaBuffers
from helios.replicas.replicas import NOTHING, Replicas


class Announcer(Protocol):
    """Says what all processes are to know at a window's end, and takes what all have said."""

    @property
    def keeps_losses(self) -> bool:
        """Whether nobody changes the losses between the last backward and the end."""
        ...

    def announce(self, *, is_before_update: bool) -> Sequence[bool]:
        """Return what this process says."""
        ...

    def listen(self, flags: Sequence[bool]) -> None:
        """Take what any process has said."""
        ...


@final
class WindowExchange:
    """Tells other processes of a window, and hears of theirs.

    Args:
        replicas: the replicas of the run.
        speaker: says what concerns the run.

    Attributes:
        buffers: those of the replicas.
    """

    def __init__(self, replicas: Replicas, speaker: Announcer) -> None:
        self.buffers = ReplicaBuffers(replicas)
        self._replicas = replicas
        self._speaker = speaker
        self._tables: list[dict[str, Any]] = []
        self._means: dict[str, Tensor] | None = None
        self._is_final = False
        self._shown: dict[str, Any] = {}

    def keep_losses(self, table: Mapping[str, Any]) -> None:
        """Keep the losses of a turn as they are now.

        Raises:
            UsageError: if they cannot be averaged.
        """
        # What follows may change a tensor that the table holds: another turn, or a commit.
        kept: dict[str, Any] = {}
        for name, loss in table.items():
            is_tensor = isinstance(loss, Tensor)
            if not (loss.numel() == 1 if is_tensor else isinstance(loss, int | float)):
                raise _make_loss_error(name, loss)
            kept[name] = loss.detach().clone() if is_tensor else loss
        self._tables.append(kept)

    def reopen(self) -> None:
        """Begin the last turn of an iteration once more: its losses are not what was told."""
        del self._tables[len(self._replicas.block) - 1 :]
        self._means = None

    def tell(self, table: Mapping[str, Any], *, is_before_update: bool) -> None:
        """End a window: tell all processes of it, with the next sum of gradients.

        Args:
            table: the losses of the last turn.
            is_before_update: whether an update follows, and hooks that could change the losses.
        """
        # From an accelerator losses come late: the gradients must not wait for them.
        is_near = self._replicas.device.type == "cpu"
        has_losses = not is_before_update or self._speaker.keeps_losses
        if has_losses:
            self.keep_losses(table)
            self._is_final, self._shown = not is_before_update, dict(table)
        self.buffers.commit()
        is_whole = self._replicas.is_whole
        has_changed, content = (False, NOTHING) if is_whole else self.buffers.write()
        flags = self._speaker.announce(is_before_update=is_before_update)
        losses = self._tables if has_losses and is_near else None
        self._replicas.tell((has_changed, *flags), losses, content)

    def hear(self) -> None:
        """Hear of all processes; the buffers of replica 0 are in place then."""
        heard = self._replicas.hear()
        has_changed, *flags = heard.flags
        if not self._replicas.is_whole:
            self.buffers.read(heard.content, has_changed=has_changed)
        self._speaker.listen(flags)
        self._means = heard.means
        if not self._is_final and not self._speaker.keeps_losses:
            # A loop is new, so that losses may change: they are asked for at the end.
            self.reopen()

    def drop_window(self) -> None:
        """End a window without an update, behind its last iteration."""
        self.buffers.commit()
        self.buffers.exchange()

    def take_means(self, table: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the mean losses of an iteration, and begin the next one.

        Args:
            table: the losses of the last turn, unless they were kept.

        Raises:
            UsageError: if they were told, and changed since.
        """
        means, shown = self._means, self._shown
        if means is not None:
            is_same = [*map(id, table.values())] == [*map(id, shown.values())]
            if not is_same or [*table] != [*shown]:
                raise _make_change_error(table, shown)
        else:
            if len(self._tables) < len(self._replicas.block):
                self.keep_losses(table)
            means = self._replicas.mean_losses(self._tables)
        self._tables, self._means = [], None
        return means


def _make_change_error(table: Mapping[str, Any], shown: Mapping[str, Any]) -> UsageError:
    names = sorted(x for x in {**table, **shown} if table.get(x) is not shown.get(x))
    return UsageError(
        "Model._loss_items must hold its losses before the gradients are added, or get them in an "
        f"event, but {names} changed behind them in code that nobody expects to do so: in the step "
        "of an optimizer or a scheduler, say, or in a method that is marked @asks_nothing. Change "
        "them in on_optimizer_step_end, and take the mark away."
    )


def _make_loss_error(name: str, loss: Any) -> UsageError:
    shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    return UsageError(
        f"Model._loss_items[{name!r}] must be a number or a tensor of one element with several "
        f"replicas, whose mean stands there, got {shown}. Keep it in an attribute of another name."
    )

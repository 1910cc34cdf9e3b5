"""``IterationListener``: what listens to the iterations of a training, besides hooks of users.

Loops know nothing of who listens. They go over the methods that :class:`Listening` has found: where
nobody listens to a call there is nothing to go over. docs/listeners.md says for each call in which
thread and on which ranks it comes, and what an error does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from helios.counters import TrainingState
from helios.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class IterationListener:
    """Listens to the iterations of a training; by default it does nothing."""

    def epoch_opened(self) -> None:
        """Note that the data of an epoch is open: optimizers may be others than before."""

    def batches_fetched(
        self,
        batches: Sequence[Any],
        indices: Sequence[Any] | None,
        contents: Sequence[Any] | None,
    ) -> Sequence[float]:
        """Note the batches of an iteration, before anybody can change them.

        Args:
            batches: the batch of each replica of this process.
            indices: those of the samples of each; ``None`` if unknown.
            contents: what was read of each batch where it was fetched; ``None`` to read it here.

        Returns:
            Numbers that are added over all processes, together with the losses. Only one listener
            of a training may have this method.
        """
        return ()

    def losses_known(self, losses: Mapping[str, Any]) -> None:
        """Note the losses of an iteration, as means over replicas, before its last events."""

    def line_due(
        self, state: TrainingState, totals: Sequence[float], *, norm: Tensor | None = None
    ) -> None:
        """Write what was noted of an iteration.

        Args:
            state: the counters.
            totals: what :meth:`batches_fetched` has returned, added over all processes.
            norm: the norm of the gradients, if one was computed.
        """

    def paused(self) -> None:
        """Note that no iteration has used the time since the last one."""

    def training_ended(self, state: TrainingState) -> None:
        """Note the end of a training that was not interrupted."""


@final
class Listening:
    """Who hears each call to listeners: only the methods that do something.

    Args:
        listeners: those of a training, in the order in which they are called.

    Attributes:
        epoch_opened: the methods of this name; the others likewise.
        batches_fetched: of one listener at most.
    """

    def __init__(self, listeners: Iterable[IterationListener] = ()) -> None:
        known = tuple(listeners)

        def find(name: str) -> tuple[Callable[..., Any], ...]:
            nothing = vars(IterationListener)[name]
            methods = (getattr(each, name) for each in known)
            return tuple(each for each in methods if each.__func__ is not nothing)

        self.epoch_opened = find("epoch_opened")
        self.batches_fetched = find("batches_fetched")
        if len(self.batches_fetched) > 1:
            names = " and ".join(type(each).__name__ for each in known)
            raise UsageError(
                f"Only one listener may have batches_fetched, got {names}: what it returns travels "
                "with the losses. Let one of them do both."
            )
        self.losses_known = find("losses_known")
        self.line_due = find("line_due")
        self.paused = find("paused")
        self.training_ended = find("training_ended")

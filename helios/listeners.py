"""Listeners to the iterations of a run, and to the run as a whole, besides hooks of users.

Loops and the writer of checkpoints do not know the listeners. They call the methods that
:class:`Listeners` has found, so an unused method costs nothing. docs/ledger.md says in which thread
and on which ranks each method is called, and what an error does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from helios.counters import TrainingState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from helios.best import BestValidation
    from helios.checkpoint.sidecar import Sidecar
    from helios.core.loss_means import LossMeans, WeightedSums
    from helios.schedule import Schedule


@final
@dataclass(slots=True)
class Iteration:
    """An iteration that has ended; one object, which is reused in each iteration.

    Attributes:
        state: the counters.
        loss_means: the sums of losses, including those of the iteration.
        losses: the table of losses, after the last event that may change it.
        means: the losses before the last events, as float64 means over replicas, for recorders.
        weighted: the sums and weights of losses that are weighted means.
        rates: the learning rates that steps have used, of optimizers whose schedulers may have
            changed them since.
        norm: the norm of the gradients before ``clip_norm``; ``None`` if none was computed.
        totals: the numbers that a listener returned for the batches, added over all processes.
        is_last: whether the iteration is the last one of its epoch.
        logs: whether losses are due to be logged.
        logged: their means, once a listener has logged them.
    """

    state: TrainingState
    loss_means: LossMeans
    losses: Mapping[str, Any] = field(default_factory=dict)
    means: Mapping[str, Any] = field(default_factory=dict)
    weighted: WeightedSums = field(default_factory=dict)
    rates: dict[Optimizer, list[Any]] = field(default_factory=dict)
    norm: Tensor | None = None
    totals: Sequence[float] = ()
    is_last: bool = False
    logs: bool = False
    logged: Mapping[str, float] | None = None


class IterationListener:
    """Listens to the iterations of a run; by default it does nothing."""

    def training_started(
        self,
        schedule: Schedule,
        *,
        epoch: int,
        steps_done: int,
        find_optimizers: Callable[[], Mapping[str, Optimizer]],
    ) -> None:
        """Handle the start of training, at the position of a new or resumed run.

        Args:
            schedule: the options of the run.
            epoch: the number of completed epochs.
            steps_done: the number of completed steps.
            find_optimizers: returns the optimizers by path.
        """

    def epoch_opened(self, epoch: int, num_batches: int | None, step: int) -> None:
        """Handle the start of an epoch's data; optimizers may be others than before.

        Args:
            epoch: the number of completed epochs.
            num_batches: the batches of this epoch, if known.
            step: the completed steps of this epoch.
        """

    def batches_fetched(
        self,
        batches: Sequence[Any],
        indices: Sequence[Any] | None,
        contents: Sequence[Any] | None,
    ) -> Sequence[float]:
        """Handle the batches of an iteration, before anything can change them.

        Args:
            batches: the batch of each replica of this process.
            indices: those of the samples of each; ``None`` if unknown.
            contents: what a worker read of each batch; ``None`` to read it here.

        Returns:
            Numbers that are added over all processes, together with the losses. Only one listener
            of a run may have this method.
        """
        return ()

    def iteration_ended(self, iteration: Iteration) -> None:
        """Handle an iteration, after its last event."""

    def evaluated(self, label: str, number: int, total: int | None) -> None:
        """Handle the progress of an evaluation, from 0 batches on.

        Args:
            label: what it is.
            number: the batches so far.
            total: all of them, if known.
        """

    def paused(self) -> None:
        """Handle the end of an evaluation, whose time belongs to no iteration."""

    def epoch_ended(self) -> None:
        """Handle the end of an epoch."""

    def training_ended(self, state: TrainingState) -> None:
        """Handle the end of a run that was not interrupted."""


@final
class Listeners:
    """The methods to call for each event: only those that do something.

    Args:
        listeners: those of a run, in the order in which they are called.

    Attributes:
        training_started: the methods of this name; the others likewise.
        batches_fetched: of one listener at most.
    """

    def __init__(self, listeners: Iterable[IterationListener] = ()) -> None:
        known = tuple(listeners)

        def find(name: str) -> tuple[Callable[..., Any], ...]:
            nothing = vars(IterationListener)[name]
            methods = (getattr(each, name) for each in known)
            return tuple(each for each in methods if each.__func__ is not nothing)

        self.training_started = find("training_started")
        self.epoch_opened = find("epoch_opened")
        self.batches_fetched = find("batches_fetched")
        self.iteration_ended = find("iteration_ended")
        self.evaluated = find("evaluated")
        self.paused = find("paused")
        self.epoch_ended = find("epoch_ended")
        self.training_ended = find("training_ended")


@dataclass(frozen=True)
class Validated:
    """A validation that has ended.

    Attributes:
        scores: those that are single numbers, by name.
        state: the counters, after the validation was counted.
        has_improved: whether ``have_metrics_improved`` returned True.
        best: the best validation so far, which may be this one; ``None`` if there is none.
        losses: the mean training losses since the validation before, by name.
    """

    scores: Mapping[str, float]
    state: TrainingState
    has_improved: bool
    best: BestValidation | None
    losses: Mapping[str, float]


class RunListener:
    """Listens to a run as a whole and its checkpoints; by default it does nothing."""

    def opened(self) -> None:
        """Begin or continue files, once the start can no longer be refused."""

    def saving(self) -> Mapping[str, Any]:
        """Return entries for the record of a checkpoint, by key."""
        return {}

    def before_commit(self) -> None:
        """Write what a checkpoint relies on; an ``OSError`` makes the save fail."""

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Handle a checkpoint that is on the disk, with its sidecar."""

    def save_failed(self, path: Path, error: Exception) -> None:
        """Handle a checkpoint that could not be written."""

    def validated(self, validated: Validated) -> None:
        """Handle the scores of a validation."""

    def ended(
        self, reason: str, *, interruption: str | None = None, error: BaseException | None = None
    ) -> None:
        """Handle the end of training: its reason, an interruption or an error."""

    def closed(self) -> None:
        """Write pending data and close files, also after an error."""


class Recorder(RunListener, IterationListener):
    """Records a run: listens to its iterations, and to the run as a whole."""

"""What listens to the iterations of a run, and to the run as a whole, besides hooks of users.

Loops and the writer of checkpoints know nothing of who listens. They go over the methods that
:class:`Listeners` has found: where nobody listens there is nothing to go over. docs/ledger.md
says for each call in which thread and on which ranks it comes, and what an error does.
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
    """An iteration that has ended; there is one object, which each iteration fills anew.

    Attributes:
        state: the counters.
        loss_means: the sums of losses, to which those of the iteration were added.
        losses: the table of losses, after the last event that may change it.
        means: the losses before the last events, as float64 means over replicas, for recorders.
        weighted: of which sums and weights some of the losses are the means.
        beside: replicas of this process, and the numbers that their steps have logged, or returned
            beside the losses; each alone, or as a sum with its weight.
        rates: the learning rates of groups that steps have used, of optimizers whose schedulers
            may have changed them since.
        norm: the norm of the gradients before ``clip_norm``; ``None`` if none was computed.
        totals: what listeners have returned of the batches, added over all processes.
        is_last: whether the iteration is the last one of its epoch.
        logs: whether losses are due to be logged.
        logged: their means, once a listener has logged them.
    """

    state: TrainingState
    loss_means: LossMeans
    losses: Mapping[str, Any] = field(default_factory=dict)
    means: Mapping[str, Any] = field(default_factory=dict)
    weighted: WeightedSums = field(default_factory=dict)
    beside: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
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
        """Note that training starts, at the position of a new or resumed run.

        Args:
            schedule: the options of the run.
            epoch: the number of completed epochs.
            steps_done: the number of completed steps.
            find_optimizers: returns the optimizers by path.
        """

    def epoch_opened(self, epoch: int, num_batches: int | None, step: int) -> None:
        """Note that the data of an epoch is open: optimizers may be others than before.

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
        """Note the batches of an iteration, before anybody can change them.

        Args:
            batches: the batch of each replica of this process.
            indices: those of the samples of each; ``None`` if unknown.
            contents: what was read of each batch where it was fetched; ``None`` to read it here.

        Returns:
            Numbers that are added over all processes, together with the losses. Only one listener
            of a run may have this method.
        """
        return ()

    def iteration_ended(self, iteration: Iteration) -> None:
        """Note an iteration, after its last event."""

    def evaluated(self, label: str, number: int, total: int | None) -> None:
        """Note how many batches of an evaluation are done; it begins with none.

        Args:
            label: what it is.
            number: the batches so far.
            total: all of them, if known.
        """

    def paused(self) -> None:
        """Note that no iteration has used the time since the last one: an evaluation ends here."""

    def epoch_ended(self) -> None:
        """Note the end of an epoch."""

    def training_ended(self, state: TrainingState) -> None:
        """Note the end of a training that was not interrupted."""


@final
class Listeners:
    """Who is notified in each call: only the methods that do something.

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
    """Listens to a run as a whole, beside its checkpoints; by default it does nothing."""

    def opened(self) -> None:
        """Begin or continue files, once nothing can refuse the start any more."""

    def saving(self) -> Mapping[str, Any]:
        """Return the marks that the record of a checkpoint holds, by the name of their key."""
        return {}

    def before_commit(self) -> None:
        """Write what a checkpoint relies on; an ``OSError`` makes the save fail."""

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Note that a checkpoint is on the disk, with the sidecar that was written beside it."""

    def save_failed(self, path: Path, error: Exception) -> None:
        """Note that a checkpoint could not be written."""

    def validated(self, validated: Validated) -> None:
        """Note the scores of a validation."""

    def ended(
        self, reason: str, *, interruption: str | None = None, error: BaseException | None = None
    ) -> None:
        """Note why training has ended, or by what it was interrupted, or which error ends it."""

    def closed(self) -> None:
        """Write what waits, and close files, whatever has happened."""


class Recorder(RunListener, IterationListener):
    """Records a run: listens to its iterations, and to the run as a whole."""

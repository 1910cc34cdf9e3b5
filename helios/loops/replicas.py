"""Several replicas in one iteration: each in turn trains on its batch, and their losses are joined.

With one replica nothing of this is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.core.scalars import as_numbers
from helios.data.passes import BatchIterator
from helios.errors import UsageError
from helios.session import Session

_LOGGER = logging.getLogger(__name__)
_END = object()


@final
class ReplicaTurns:
    """Lets the replicas of this process train, one after the other.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._knows_buffers = False
        self._has_watched = False

    def look_again(self) -> None:
        """Look for buffers anew when the next window opens: hooks may have changed the networks."""
        self._knows_buffers = False

    def run(
        self, batches: Sequence[Any], train: Callable[[Any], Any], *, opens_window: bool
    ) -> None:
        """Train on the batches of one iteration, and put the mean losses into the model's table.

        Args:
            batches: one for each replica of this process.
            train: trains on the batch of one replica.
            opens_window: whether the iteration is the first of its window.
        """
        session, turns = self._session, self._session.turns
        if opens_window and not self._knows_buffers:
            turns.find_buffers(session.model.discovery.modules().values())
            self._knows_buffers = True
        number = session.state.global_iteration
        # Again at powers of two: what a step does later on is found, too, at little cost.
        turns.is_watched = not self._has_watched or number & (number - 1) == 0
        losses: list[dict[str, Any]] = []
        for replica, batch in zip(session.replicas.block, batches, strict=True):
            turns.begin(replica, opens_window=opens_window)
            session.model.loss_items.clear()
            session.context.begin_batch(batch)
            train(batch)
            # What follows may change a tensor that the table holds: another turn, or a commit.
            losses.append({n: _copy_of(loss) for n, loss in session.model.loss_items.items()})
            if not turns.is_last:
                turns.end()
        turns.finish(ends_window=session.state.is_step_boundary)
        if turns.is_watched:
            self._has_watched = True
            _report_changes(session)
        table = session.model.loss_items
        table.clear()
        table.update(self._join(losses))

    def _join(self, losses: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        for table in losses:
            for name, loss in table.items():
                is_tensor = isinstance(loss, Tensor)
                if not (loss.numel() == 1 if is_tensor else isinstance(loss, int | float)):
                    shown = tuple(loss.shape) if is_tensor else type(loss).__name__
                    raise UsageError(
                        f"Model._loss_items[{name!r}] must be a number or a tensor of one element "
                        f"with several replicas, whose mean stands there, got {shown}. Keep it in "
                        "an attribute of another name."
                    )
        return self._session.replicas.mean_losses(losses)


class TurnWatch:
    """Sees what the turn of a replica changes besides gradients and buffers (R3).

    Args:
        session: the run, before the step.

    Raises:
        UsageError: for a lazy layer, which would get other weights in each process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        for path, network in session.model.discovery.modules().items():
            if any(map(is_lazy, (*network.parameters(), *network.buffers()))):
                raise UsageError(
                    f"The network {path!r} has lazy layers, which draw their weights in the first "
                    "step: with several replicas each process would draw others. Run a batch "
                    "through it in Model.setup()."
                )
        is_first = session.state.global_iteration == 1
        self._watch = session.model.discovery.watch(reads_weights=is_first)
        self._others = session.owner_states.watch()

    def conclude(self, *, is_manual: bool) -> None:
        """Note what has changed.

        Args:
            is_manual: whether the step makes its updates itself, so that weights count as moved on
                purpose.
        """
        turns = self._session.turns
        turns.changes.update(self._watch.changed(counts_parameters=not is_manual))
        for name, watch in self._others:
            turns.changes.update(f"{name}: {path}" for path in watch.changed())
        turns.is_manual |= is_manual


def _report_changes(session: Session) -> None:
    """Say once what steps change that is no replica's own; the same on all processes."""
    found = session.replicas.gather_objects(sorted(session.turns.changes))
    session.turns.changes.clear()
    names = sorted({name for part in found for name in part} - set(session.unshared))
    session.unshared = sorted({*session.unshared, *names})
    # In manual steps and yields each replica has a process of its own in any case.
    if not names or session.turns.is_manual:
        return
    add_obstacle(session, f"train_step changes {', '.join(names)}")
    _LOGGER.warning(
        "%s.train_step changes %s. Every replica does so on its own, so other numbers of "
        "processes give other values there: the run is bound to its number of processes. "
        "Change it in a hook (on_training_batch_end), or make it a buffer of a network.",
        type(session.model).__name__,
        ", ".join(names),
    )


def compare_scores(session: Session, scores: Mapping[str, Any], step: str) -> None:
    """Warn of scores that are not the same on all processes: they were not summed.

    Args:
        session: the run.
        scores: a table of the model, after its last hook.
        step: the name of the step that should return them.
    """
    tables = session.replicas.gather_objects(as_numbers(scores))
    first, *others = ({name: repr(value) for name, value in table.items()} for table in tables)
    names = {n for table in others for n in table | first if table.get(n) != first.get(n)}
    text = f"scores that differ between processes: {', '.join(sorted(names))}"
    if names and add_obstacle(session, text):
        _LOGGER.warning(
            "The scores %s differ between processes, though each sees a part of the data only. "
            "Return {name: (sum, weight)} from %s: they are added over all.",
            ", ".join(sorted(names)),
            step,
        )


def _copy_of(loss: Any) -> Any:
    return loss.detach().clone() if isinstance(loss, Tensor) else loss


def add_obstacle(session: Session, text: str) -> bool:
    """Note what binds the run to its number of processes; returns whether it is new."""
    is_new = text not in session.obstacles
    if is_new:
        session.obstacles.append(text)
    return is_new


@final
class EvenBatches(BatchIterator):
    """The batches of processes whose data may end at different iterations (R46).

    The first process whose data ends ends the pass for all; what the others have left is not used.

    Args:
        batches: those of this process.
        session: the run.
    """

    def __init__(self, batches: BatchIterator, session: Session) -> None:
        self._batches = batches
        self._session = session

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        has_ended, is_last = self._session.replicas.agree(batch is _END, self._batches.is_last)
        if has_ended:
            self.close()
            raise StopIteration
        self.num_samples, self.is_last = self._batches.num_samples, is_last
        return batch

    def close(self) -> None:
        """End the pass and its workers."""
        self._batches.close()

"""Computes along in turns in which this process has no replica, because sharding needs everybody.

In such a turn the process repeats its last step. The others do not look at its gradients, and it
leaves no trace.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from helios.loops.step import begin_forward, loss_of, take_step
from helios.loops.step_trace import StepTrace
from helios.run_state.replica_watch import TurnWatch
from helios.session import Session
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)


@final
class RunningAlong:
    """Takes the steps of a process that has no replica in the last turn of each iteration.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._batch: Any = None
        self._has_watched = False

    def if_due(self) -> RunningAlong:
        """Return this object: every iteration has such a turn."""
        return self

    def take_step(self, session: Session, step: str, batch: Any, state: TrainingState) -> Any:
        """Run a step, as :func:`helios.loops.step.take_step` does, and keep its batch."""
        self._batch = begin_forward(session, batch)
        return take_step(session, step, self._batch, state, has_begun=True)

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None) -> None:
        """Do backward of a replica."""
        self._session.engine.backward_loss(loss, inputs)

    def end_backward(self) -> None:
        """After the last replica of this process, repeat its step for the others."""
        session, batch = self._session, self._batch
        if not session.turns.is_last:
            return
        self._batch = None
        session.engine.end_turn()
        watch = None if self._has_watched else TurnWatch(session, self._warn, reads_weights=False)
        with StepTrace(session, ()).erased():
            loss = loss_of(take_step(session, "train_step", batch, session.state, has_begun=True))
            assert loss is not None, "a step is automatic or manual, never both"
            session.engine.backward_loss(loss)
        if watch is not None:
            self._has_watched = True
            watch.conclude(is_manual=False)

    def _warn(self, found: list[str], *, is_manual: bool) -> None:
        if found:
            _LOGGER.warning(
                "%s.train_step changes %s. In this process it is called once more in each "
                "iteration, because the sharded model needs all processes when the last replicas "
                "train. Change it in on_training_batch_end.",
                type(self._session.model).__name__,
                ", ".join(found),
            )

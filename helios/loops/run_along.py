"""Computes along in turns in which this process has no replica, because sharding needs everybody.

In such a turn the process repeats its last step. The others do not look at its gradients, and it
leaves no trace. Attributes of model and plugins are copied before, if the step changes any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from helios.loops.step import begin_forward, loss_of, take_step
from helios.loops.step_trace import StepTrace
from helios.session import Session
from helios.state import TrainingState
from helios.state_graph.consistency import TurnWatch
from helios.state_graph.rollback import Rollback


@final
class RunningAlong:
    """Takes the steps of a process that has no replica in the last turn of each iteration.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._batch: Any = None
        self._keeps_attributes = True

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
        session.gradients.end_turn()
        if not self._keeps_attributes:
            self._repeat(batch)
            return
        watch = TurnWatch(
            session.model.discovery,
            session.owner_states,
            self._note,
            reads_weights=False,
            sees_unsaved=True,
        )
        before = copy_attributes(session)
        self._keeps_attributes = False
        self._repeat(batch)
        watch.conclude(is_manual=False)
        # The gradients of the turn are not a trace of it.
        parameters = [*session.gradients.sharded_parameters()]
        gradients = [parameter.grad for parameter in parameters]
        before.put_back()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _repeat(self, batch: Any) -> None:
        session = self._session
        with StepTrace(session, ()).erased():
            loss = loss_of(take_step(session, "train_step", batch, session.state, has_begun=True))
            assert loss is not None, "a step is automatic or manual, never both"
            session.engine.backward_loss(loss)

    def _note(self, found: list[str], hook: str, *, is_manual: bool) -> None:
        self._keeps_attributes = bool(found)


def copy_attributes(session: Session) -> Rollback:
    """Return a copy of what a step may change in the model and in plugins."""
    return Rollback([session.model, *session.plugins.values()])

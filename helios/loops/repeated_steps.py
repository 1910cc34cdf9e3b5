"""Repeats a step without a trace, in turns in which a process has no replica.

Sharding needs all processes in each turn; the others do not look at the gradients of such a one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch

from helios.backup import Backup
from helios.core import rng
from helios.core.generators import (
    Generator,
    is_generator,
    load_generator,
    state_of_generator,
)
from helios.core.sharded_tensors import is_sharded
from helios.counters import TrainingState
from helios.loops.step import begin_forward, loss_of, take_step
from helios.model.model import Model
from helios.session import Session
from helios.terminal import root_logger as log


def _read_generators(model: Model, device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, of this process's device only."""
    state = rng.get_rng_state_dict() | {"legacy": np.random.get_state()}
    state["global"] = [state_of_generator(each) for each in _find_global(model)]
    if "cuda" in state:
        state["cuda"] = state["cuda"][device.index or 0]
    return state


def _set_generators(model: Model, state: Mapping[str, Any]) -> None:
    """Set all generators, as :func:`_read_generators` has found them."""
    state = dict(state)
    np.random.set_state(state.pop("legacy"))
    for generator, each in zip(_find_global(model), state.pop("global"), strict=False):
        load_generator(generator, each)
    if "cuda" in state:
        state["cuda"] = [state["cuda"]] * torch.cuda.device_count()
    rng.load_rng_state_dict(state)


def _find_global(model: Model) -> list[Generator]:
    """Return the generators among the globals of the modules that define model and networks."""
    parts = [
        model,
        *(part for each in model.discovery.modules().values() for part in each.modules()),
    ]
    names = {kind.__module__ for part in parts for kind in type(part).__mro__}
    own = sorted(name for name in names if name.partition(".")[0] not in ("builtins", "torch"))
    modules = [vars(sys.modules[name]) for name in own if name in sys.modules]
    found = [each[name] for each in modules for name in sorted(each) if is_generator(each[name])]
    return list({id(each): each for each in found}.values())


@contextmanager
def without_trace(session: Session) -> Iterator[None]:
    """Run a step in a block that leaves no trace.

    Generators, buffers, what model and plugins hold, losses and requests are as before afterwards,
    and no scalars are logged meanwhile. Only sharded parameters and their gradients are left alone,
    for others need what the step adds to them.
    """
    replica, batch = session.turns.replica, session.batch
    generators = _read_generators(session.model, session.engine.device)
    backup = Backup([session.model, *session.plugins.values()], leave=is_sharded)
    requests = session.agreement.remember()
    session.is_repeating = True
    try:
        with log.muted_tensorboard():
            yield
    finally:
        session.is_repeating = False
        session.agreement.take_back(requests)
        backup.restore()
        session.turns.replica, session.batch = replica, batch
        _set_generators(session.model, generators)


@final
class PaddingTurns:
    """The turns of a process that has no replica in the last turn of each iteration.

    It repeats its last step there.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._batch: Any = None

    def take_step(self, session: Session, step: str, batch: Any, state: TrainingState) -> Any:
        """Run a step, as :func:`helios.loops.step.take_step` does, and keep its batch."""
        self._batch = begin_forward(session, batch)
        return take_step(session, step, self._batch, state, has_begun=True)

    def end_backward(self) -> None:
        """After the last replica of this process, repeat its step for the others."""
        session, batch = self._session, self._batch
        if not session.turns.is_last:
            return
        self._batch = None
        session.gradients.end_turn()
        with without_trace(session):
            loss = loss_of(take_step(session, "train_step", batch, session.state, has_begun=True))
            assert loss is not None, "a step is automatic or manual, never both"
            session.engine.backward_loss(loss)

"""A model of one weight, and sessions in which a loop runs without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from helios.core.progress import NullDisplay
from helios.engines.engine import Engine
from helios.hooks.bus import Bus
from helios.loops.loop import Loop
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.plugin import Plugin
from helios.schedule import Schedule
from helios.session import Session
from helios.state import TrainingState, TrainingUnit

EPOCH, ITERATION = TrainingUnit.EPOCH, TrainingUnit.ITERATION


class Stepper(Model):
    """One weight, whose gradient is the batch; what `train_step` returns is up to the test."""

    def __init__(self, answer: Callable[[Tensor, Any], Any] | None = None) -> None:
        super().__init__("stepper")
        self.answer = answer or (lambda weight, batch: (weight * batch).sum())
        self.setup()

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.optimizer = SGD(self.net.parameters(), lr=1.0)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return self.answer(self.net.weight, batch)

    @property
    def weight(self) -> float:
        return self.net.weight.item()

    @property
    def gradient(self) -> float | None:
        grad = self.net.weight.grad
        return None if grad is None else grad.item()


def make_session(
    model: Model,
    *plugins: Plugin,
    unit: TrainingUnit = ITERATION,
    accumulation: int = 1,
    engine: Engine | None = None,
) -> Session:
    model.device = torch.device("cpu")
    engine = engine or Engine(model.device)
    return Session(
        model=model,
        engine=engine,
        hooks=Bus(plugins=plugins, model=model, engine=engine),
        display=NullDisplay(),
        seed=0,
        schedule=Schedule(unit=unit, accumulation_steps=accumulation),
        schedulers=Schedulers(model.discovery.schedulers(), model.scheduler_interval),
    )


def train_on(loop: Loop, session: Session, batch: Any, *, is_boundary: bool = True) -> bool:
    """Run one iteration, as the epoch loop does; returns whether its step was committed."""
    session.state.begin_iteration(session.schedule.unit, is_boundary=is_boundary)
    session.context.open_window()
    session.model.on_training_batch_start(session.state)
    loop.run(batch)
    if is_boundary:
        session.context.close_window()
    return session.state.is_step_committed


def attached(loop: Loop, session: Session) -> Loop:
    loop.attach(session)
    return loop

"""A model of one weight, and the objects of a run in which a loop runs without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.data.source import BatchIterator, Source
from helios.engines.engine import Engine
from helios.hooks.bus import Bus
from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.schedule import Schedule
from helios.state import Phase, TrainingState, TrainingUnit
from helios.terminal.progress import Display
from tests.support.quiet import Quiet

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


def make_parts(
    model: Model,
    *plugins: Plugin,
    unit: TrainingUnit = ITERATION,
    accumulation: int = 1,
    engine: Engine | None = None,
    replicas: Replicas | None = None,
    sources: dict[Phase, list[Source]] | None = None,
    sanity_steps: int = 0,
    writer: CheckpointWriter | None = None,
    can_save: bool = False,
    **options: Any,
) -> RunParts:
    """Return a parts; further options are those of its schedule."""
    model.device = torch.device("cpu")
    engine = engine or Engine(model.device)
    if replicas is not None:
        engine.replicas = replicas
    parts = RunParts(
        model=model,
        engine=engine,
        hooks=Bus(plugins=plugins, model=model, engine=engine),
        display=Display(),
        seed=0,
        schedule=Schedule(unit=unit, accumulation_steps=accumulation, **options),
        sources=sources or {},
        sanity_steps=sanity_steps,
        writer=writer,
        can_save=can_save,
        plugins={plugin.plug_id: plugin for plugin in plugins},
        schedulers=Schedulers(model.discovery.schedulers(), model.scheduler_interval),
    )
    for plugin in plugins:
        plugin.context = parts.context
    return parts


class ListBatches(BatchIterator):
    """A pass over a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._waiting = list(items)

    def __next__(self) -> Any:
        if not self._waiting:
            raise StopIteration
        item = self._waiting.pop(0)
        self.num_samples = 1
        self.is_last = not self._waiting
        return item

    def close(self) -> None:
        """Nothing to end."""


class ListSource(Source):
    """Data that lies in a list: an entry for each iteration, the same in each epoch."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__()
        self.items = items
        self.loader = None

    def _describe(self) -> dict[str, Any]:
        return {}

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> ListBatches:
        return ListBatches(self.items[batch:])

    def _count_batches(self, batch: int, sample: int) -> int:
        return len(self.items)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """Nothing to end."""


class Failing(Quiet):
    """Raises in one event."""

    def __init__(self, event: str, error: BaseException) -> None:
        super().__init__()

        def fail(*args: Any) -> None:
            raise error

        setattr(self, event, fail)


def make_fit_loop(optimizer_loop: Loop | None = None) -> FitLoop:
    """Return a whole tree of loops."""
    batches = BatchLoop(optimizer_loop or OptimizerLoop())
    return FitLoop(EpochLoop(batches, ValidationLoop()))


def fit(parts: RunParts, loop: FitLoop | None = None) -> Any:
    """Train by the loops alone, as a trainer does; returns the result of the run."""
    loop = loop or make_fit_loop()
    loop._attach(parts)
    try:
        return loop.run()
    finally:
        loop.teardown()
        loop._attach(None)


def train_on(loop: Loop, parts: RunParts, batch: Any, *, is_boundary: bool = True) -> bool:
    """Run one iteration, as the epoch loop does; returns whether its step was committed."""
    parts.run.state.begin_iteration(parts.schedule.unit, is_boundary=is_boundary)
    parts.run.is_window_open = True
    parts.model.on_training_batch_start(parts.run.state)
    loop.run(batch)
    if is_boundary:
        parts.run.is_window_open = False
    return parts.run.state.is_step_committed


def attached(loop: Loop, parts: RunParts) -> Loop:
    loop._attach(parts)
    return loop

"""The owners of the matrix: what holds the value, and how a training gets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import helios
from helios.engines.engine import Engine
from helios.loops import BatchLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.matrix.values import attributes_of

Fill = Callable[[Any], None]


def _do_nothing() -> None:
    pass


@dataclass
class Subjects:
    """What a training is made of."""

    model: Tiny
    data: helios.DataModule
    find: Callable[[], Any]
    plugins: list[Plugin] = field(default_factory=list)
    engine: Engine | None = None
    loop: BatchLoop | None = None


class Tiny(helios.Model):
    """A weight, an optimizer and a scheduler; its steps call a function."""

    def __init__(self) -> None:
        super().__init__("tiny")
        self.on_step: Callable[[], None] = _do_nothing

    def setup(self, fast_init: bool = False) -> None:
        self.net = self.make_network()
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler()

    def make_network(self) -> nn.Module:
        return nn.Linear(1, 1)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)

    def make_scheduler(self) -> LRScheduler:
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 100)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.on_step()
        return self.net(batch[0]).sum()


class Data(helios.DataModule):
    """Twelve samples."""

    def setup(self) -> None:
        samples = TensorDataset(torch.ones(12, 1))
        self._train_dataset = self._create_dataset(samples, helios.DataLoaderParams())


class Layer(nn.Linear):
    """A module with an attribute."""


class OwnSgd(torch.optim.SGD):
    """An optimizer with an attribute."""


class OwnStepLR(torch.optim.lr_scheduler.StepLR):
    """A scheduler with an attribute."""


class Wrapper:
    """An object whose state_dict leaves something out."""

    def __init__(self) -> None:
        self.known = 1

    def state_dict(self) -> dict[str, Any]:
        return {"known": self.known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.known = state_dict["known"]


class Silent(Plugin):
    """A plugin without a state_dict."""

    def __init__(self, fill: Fill) -> None:
        super().__init__("holder")
        self.fill = fill

    def setup(self) -> None:
        self.fill(self)


class Telling(Silent):
    """A plugin with one, which leaves something out."""

    def state_dict(self) -> dict[str, Any]:
        return {"known": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"known": 1}


class OwnBatchLoop(BatchLoop):
    """A loop with an attribute."""


class OwnEngine(Engine):
    """An engine with an attribute."""


def _in_model(fill: Fill) -> Subjects:
    class Holding(Tiny):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            fill(self)

    model = Holding()
    return Subjects(model, Data(), lambda: model)


def _in_module(fill: Fill) -> Subjects:
    class Holding(Tiny):
        def make_network(self) -> nn.Module:
            layer = Layer(1, 1)
            fill(layer)
            return layer

    model = Holding()
    return Subjects(model, Data(), lambda: model.net)


def _in_optimizer(fill: Fill) -> Subjects:
    class Holding(Tiny):
        def make_optimizer(self) -> torch.optim.Optimizer:
            optimizer = OwnSgd(self.net.parameters(), lr=0.5)
            fill(optimizer)
            return optimizer

    model = Holding()
    return Subjects(model, Data(), lambda: model.optimizer)


def _in_scheduler(fill: Fill) -> Subjects:
    class Holding(Tiny):
        def make_scheduler(self) -> LRScheduler:
            scheduler = OwnStepLR(self.optimizer, 100)
            fill(scheduler)
            return scheduler

    model = Holding()
    return Subjects(model, Data(), lambda: model.scheduler)


def _in_wrapper(fill: Fill) -> Subjects:
    class Holding(Tiny):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.wrapper = Wrapper()
            fill(self.wrapper)

    model = Holding()
    return Subjects(model, Data(), lambda: model.wrapper)


def _in_silent_plugin(fill: Fill) -> Subjects:
    plugin = Silent(fill)
    return Subjects(Tiny(), Data(), lambda: plugin, plugins=[plugin])


def _in_telling_plugin(fill: Fill) -> Subjects:
    plugin = Telling(fill)
    return Subjects(Tiny(), Data(), lambda: plugin, plugins=[plugin])


def _in_data(fill: Fill) -> Subjects:
    class Holding(Data):
        def setup(self) -> None:
            super().setup()
            fill(self)

    data = Holding()
    return Subjects(Tiny(), data, lambda: data)


def _in_loop(fill: Fill) -> Subjects:
    loop = OwnBatchLoop()
    fill(loop)
    return Subjects(Tiny(), Data(), lambda: loop, loop=loop)


def _in_engine(fill: Fill) -> Subjects:
    engine = OwnEngine("cpu")
    fill(engine)
    return Subjects(Tiny(), Data(), lambda: engine, engine=engine)


_OWNERS: dict[str, Callable[[Fill], Subjects]] = {
    "model": _in_model,
    "module": _in_module,
    "optimizer": _in_optimizer,
    "scheduler": _in_scheduler,
    "wrapper": _in_wrapper,
    "plugin": _in_silent_plugin,
    "plugin with state_dict": _in_telling_plugin,
    "data module": _in_data,
    "loop": _in_loop,
    "engine": _in_engine,
}
OWNERS = tuple(_OWNERS)


def build(owner: str, value: str) -> Subjects:
    """Return the parts of a training in which an owner holds a value."""

    def fill(target: Any) -> None:
        for name, part in attributes_of(value).items():
            setattr(target, name, part)

    return _OWNERS[owner](fill)

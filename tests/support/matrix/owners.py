"""The places of the matrix: who may hold a value, and a training with such an owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios.engines.engine import Engine
from helios.loops import BatchLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.matrix.values import attributes_of

Hold = Callable[[str, Any], Any]
"""Lets an object hold the value if it is the owner of this name, and returns the object."""


def _do_nothing() -> None:
    pass


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


class Tiny(helios.Model):
    """A weight, an optimizer and a scheduler; its steps call a function."""

    unsaved = ("hold",)

    def __init__(self, hold: Hold) -> None:
        super().__init__("tiny")
        self.hold = hold
        self.on_step: Callable[[], None] = _do_nothing

    def setup(self, fast_init: bool = False) -> None:
        self.module = self.hold("module", Layer(1, 1))
        self.optimizer = self.hold("optimizer", OwnSgd(self.module.parameters(), lr=0.5))
        self.scheduler = self.hold("scheduler", OwnStepLR(self.optimizer, 100))
        self.wrapper = self.hold("wrapper", Wrapper())
        self.hold("model", self)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.on_step()
        loss: Tensor = self.module(batch[0]).sum()
        return loss


class Data(helios.DataModule):
    """Twelve samples."""

    unsaved = ("hold",)

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self.hold = hold

    def setup(self) -> None:
        samples = TensorDataset(torch.ones(12, 1))
        self._train_dataset = self._create_dataset(samples, helios.DataLoaderParams())
        self.hold("data module", self)


class Silent(Plugin):
    unsaved = ("hold",)
    owner = "plugin"

    def __init__(self, hold: Hold) -> None:
        super().__init__("holder")
        self.hold = hold

    def setup(self) -> None:
        self.hold(self.owner, self)


class Telling(Silent):
    """A plugin with one, which leaves something out."""

    owner = "plugin with state_dict"

    def state_dict(self) -> dict[str, Any]:
        return {"known": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"known": 1}


class OwnBatchLoop(BatchLoop):
    """A loop with an attribute."""


class OwnEngine(Engine):
    """An engine with an attribute."""


_OF_MODEL = ("module", "optimizer", "scheduler", "wrapper")
_PLUGINS: dict[str, type[Silent]] = {kind.owner: kind for kind in (Silent, Telling)}
OWNERS = ("model", *_OF_MODEL, *_PLUGINS, "data module", "loop", "engine")


@dataclass
class Subjects:
    """What a training is made of; ``find`` returns the owner of the value, once setup has run."""

    model: Tiny
    data: helios.DataModule
    find: Callable[[], Any]
    plugins: list[Plugin]
    engine: Engine | None
    loop: BatchLoop | None


def build(owner: str, value: str) -> Subjects:
    """Return the parts of a training in which an owner holds a value."""
    owners: list[Any] = []

    def hold(name: str, target: Any) -> Any:
        if name == owner:
            owners.append(target)
            for attribute, part in attributes_of(value).items():
                setattr(target, attribute, part)
        return target

    model = Tiny(hold)
    return Subjects(
        model,
        Data(hold),
        # A resume may have put another object into the model.
        lambda: getattr(model, owner) if owner in _OF_MODEL else owners[0],
        plugins=[_PLUGINS[owner](hold)] if owner in _PLUGINS else [],
        engine=hold("engine", OwnEngine("cpu")) if owner == "engine" else None,
        loop=hold("loop", OwnBatchLoop()) if owner == "loop" else None,
    )

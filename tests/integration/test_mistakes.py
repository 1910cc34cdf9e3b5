"""Frequent mistakes in scripts: the error names the rule, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.loops import OptimizerLoop
from helios.model import BatchProcessor
from tests.support.quiet import Quiet


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.arange(4.0).reshape(4, 1)
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(TensorDataset(x), params)


class Line(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: Any) -> Any:
        return self.net(batch[0]).square().mean()


class Detached(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        return super().train_step(batch, state).detach()


class Vector(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        return self.net(batch[0]).square()


class YieldsOnce(Line):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.other = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: Any) -> Any:
        yield super().train_step(batch, state)


class Exchanged(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        outputs = model.net(batch[0])
        return outputs.mean(), outputs


class Processed(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.batch_processor = Exchanged()


class Late(Quiet):
    def on_training_batch_end(self, state: Any) -> None: ...


class DoneIsAMethod(OptimizerLoop):
    def done(self) -> bool:  # type: ignore[override]
        return True


class Silent(helios.Engine):
    def optimizer_step(self, optimizer: Any) -> Any:
        super().optimizer_step(optimizer)


def fit(kind: type[helios.Model] = Line, loop: Any = None, **options: Any) -> None:
    where = {} if "engine" in options else {"use_cpu": True}
    trainer = helios.Trainer(
        total_steps=2, train_unit="iteration", print_banner=False, **where, **options
    )
    if loop is not None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    trainer.fit(kind("line"), Data())


@pytest.mark.shows("K45")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit(Detached), ("train_step", "requires_grad=False", "do not detach")),
        (lambda: fit(Vector), ("scalar loss", "shape (2, 1)", "loss.mean()")),
        (lambda: fit(YieldsOnce), ("one loss for each", "optimizer, other", "'other'", "yield")),
        (lambda: fit(Processed), ("(outputs, loss)", "(2, 1)")),
        (lambda: fit(plugins=[Late("late")]), ("(state, should_log)", "takes (state", "Correct")),
        (lambda: fit(plugins=[Late]), ("list of Plugin objects", "Late", "Derive")),
        (lambda: fit(loop=DoneIsAMethod()), ("property", "got a method", "@property")),
        (lambda: fit(engine=Silent("cpu")), ("True or False", "got None", "Return")),
        (lambda: fit(engine="cuda"), ("must be an Engine", "'cuda'", "Engine.auto")),
    ],
)
def test_an_error_names_the_rule_what_was_found_and_what_to_do(
    make: Callable[[], None], words: tuple[str, ...]
) -> None:
    with pytest.raises(helios.HeliosError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []

"""``context.num_steps`` and ``context.steps_per_epoch``: what is known before it is what is run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios import Phase
from helios.data.steps import Steps
from helios.data.stream import Stream
from tests.support.ranks import let_launcher_start_from_server

NUM_SAMPLES = 46


class Data(helios.DataModule):
    def __init__(self, *, drop_last: bool = False, num_samples: int = NUM_SAMPLES) -> None:
        super().__init__()
        self.drop_last, self.num_samples = drop_last, num_samples

    def setup(self) -> None:
        data = TensorDataset(torch.arange(float(self.num_samples)).unsqueeze(1) / 100)
        params = {"batch_size": 3, "shuffle": True, "drop_last": self.drop_last}
        self.train_dataset = self.create_dataset(data, **params)
        self.valid_dataset = self.create_dataset(data, **params)


class Net(helios.Model):
    """Asks in ``setup``, at the start and at the end, and counts the steps of each epoch."""

    unsaved = ("said", "steps")

    def __init__(self, *, asks: bool = True) -> None:
        super().__init__("net")
        self.asks = asks
        self.said: list[tuple[int | None, int | None]] = []
        self.steps: list[int] = []

    def setup(self, fast_init: bool = False) -> None:
        if self.asks:
            self.ask()
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def ask(self) -> None:
        self.said.append((self.context.num_steps, self.context.steps_per_epoch))

    def on_fit_start(self) -> None:
        self.ask()

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.steps.append(0)

    def on_training_step_end(self, state: Any, committed: bool) -> None:
        self.steps[-1] += 1

    def on_training_end(self) -> None:
        self.ask()

    def train_step(self, batch: Any) -> Any:
        return self.net(batch[0]).square().mean()

    def valid_step(self, batch: Any) -> Any:
        return {"error": (self.net(batch[0]).square().sum(), len(batch[0]))}


def fit(model: helios.Model, data: helios.DataModule, **options: Any) -> None:
    options = {"use_cpu": True, "print_banner": False, "valid_frequency": None} | options
    helios.Trainer(**options).fit(model, data)


_LENGTHS = ({"max_epochs": 3}, {"max_steps": 20}, {"max_epochs": 3, "max_steps": 17})
_WINDOWS = (1, 4)
_DATA = (
    {"num_replicas": 1, "drop_last": False},
    {"num_replicas": 1, "drop_last": True},
    {"num_replicas": 3, "drop_last": False},
    {"num_replicas": 3, "drop_last": True, "sanity_steps": 2, "valid_frequency": 1},
    {"num_replicas": 2, "drop_last": False, "batch_limits": {Phase.TRAINING: 6}},
)


@pytest.mark.parametrize(
    ("length", "window", "data"),
    [
        (length, _WINDOWS[(place + number) % 2], data)
        for number, length in enumerate(_LENGTHS)
        for place, data in enumerate(_DATA)
        if (place + 2 * number) % 5 < 3
    ],
)
def test_a_run_makes_the_steps_that_setup_was_told(
    length: dict[str, Any], window: int, data: dict[str, Any]
) -> None:
    options = {**data, **length, "accumulation_steps": window}
    model = Net()
    fit(model, Data(drop_last=options.pop("drop_last")), **options)
    (steps, per_epoch), *others = model.said
    assert others == [(steps, per_epoch)] * 2
    assert steps == sum(model.steps)
    # The last epoch may be cut by max_steps.
    whole = {*model.steps[:-1]}
    assert per_epoch in (*whole, None)
    assert per_epoch is None or len(whole) == 1
    # By steps, windows go on in the next epoch.
    assert per_epoch is not None or ("max_epochs" not in length and window > 1)


def open_part(index: int, count: int) -> list[torch.Tensor]:
    return [torch.ones(1)] * 6


class Other(helios.DataModule):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def setup(self) -> None:
        is_stream = isinstance(self.data, Stream)
        made = self.create_dataset(self.data, batch_size=2) if is_stream else self.data
        self.train_dataset = made


class Counting(Net):
    def train_step(self, batch: Any) -> Any:
        return self.net(torch.ones(1)).sum() * 1e-3


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [
        (Stream(open_part), {"max_epochs": 2}, (None, None)),
        (Stream(open_part), {"max_epochs": 2, "max_steps": 2}, (None, None)),
        (Stream(open_part), {"max_steps": 4}, (4, None)),
        (Steps(), {"max_steps": 4}, (4, None)),
        (Steps(5), {"max_epochs": 2}, (10, 5)),
    ],
)
def test_what_nobody_knows_is_none(data: Any, length: dict[str, Any], said: Any) -> None:
    model = Counting()
    fit(model, Other(data), **length)
    assert {*model.said} == {said}


class Drawing(Data):
    """Draws where the loader is made."""

    def train_dataloader(self) -> Any:
        torch.rand(3)
        return super().train_dataloader()


@pytest.mark.parametrize("init", ["setup", "keyed"])
def test_who_asks_in_setup_trains_with_the_same_bits(init: str) -> None:
    models = [Net(asks=asks) for asks in (True, False)]
    for model in models:
        fit(model, Drawing(), max_epochs=1, init=init)
    weights = [model.net.weight.item() for model in models]
    assert weights[0] == weights[1]
    assert models[0].said[0] == models[1].said[0] == (16, 16)


class Cosine(Net):
    """The schedule of docs/recipes/learning-rate.md, with what it starts with."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        total = self.context.num_steps
        assert total is not None
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total))
        )

    test_step = Net.valid_step

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch[0])


class Complete(Data):
    def setup(self) -> None:
        super().setup()
        self.test_dataset = self.create_dataset(self.valid_dataset, batch_size=3)
        self.predict_dataset = self.create_dataset(self.valid_dataset, batch_size=3)


@pytest.mark.parametrize(("nproc", "calls"), [(1, ("validate", "test", "predict")), (2, ("test",))])
def test_a_resume_and_an_evaluation_are_told_the_length_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nproc: int, calls: tuple[str, ...]
) -> None:
    let_launcher_start_from_server(monkeypatch)
    model, resumed = Cosine(), Cosine()
    options = {"chkpt_root": tmp_path, "num_replicas": 2, "nproc": nproc}
    fit(model, Complete(), max_epochs=1, **options)
    fit(resumed, Complete(), max_epochs=2, **options)
    assert (model.said[0], {*resumed.said}) == ((8, 8), {(16, 8)})
    for call in calls:
        evaluated = Cosine()
        trainer = helios.Trainer(chkpt_root=tmp_path, use_cpu=True, nproc=nproc)
        assert getattr(trainer, call)(evaluated, Complete())
        assert evaluated.said == [(16, 8)], call

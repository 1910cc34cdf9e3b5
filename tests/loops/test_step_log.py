"""``Model.log``: means over batches, replicas and processes, weighted by samples or by a weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks

LENGTH = 11


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


def make_data() -> helios.DataModule:
    return helios.DataModule.from_datasets(train=Indices(), valid=Indices(), batch_size=2)


class Net(helios.Model):
    def setup(self) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-5)

    def train_step(self, batch: Any) -> Any:
        self.log("index", batch.mean())
        self.log("doubled", 2.0 * float(batch.mean()), weight=len(batch))
        if batch.max() > 8:
            self.log("rare", 1)
        return self.net(batch[:, None]).square().mean()

    def valid_step(self, batch: Any) -> None:
        self.log("index", batch.mean())
        self.log("square", batch.square().sum() / 4, weight=3)


class Points(Quiet):
    """Keeps what was logged of each iteration."""

    unsaved = ("points",)

    def __init__(self) -> None:
        super().__init__("points")
        self.points: list[dict[str, float]] = []

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.points.append(dict(scalars))


def train(rank: int = 0, **options: Any) -> tuple[list[dict[str, float]], dict[str, float]]:
    points = Points()
    given: dict[str, Any] = {"max_epochs": 2, "print_frequency": 6, "print_banner": False}
    trainer = helios.Trainer(**{**given, "use_cpu": True, "plugins": [points], **options})
    model, data = Net(), make_data()
    trainer.fit(model, data)
    return points.points, dict(trainer.validate(model, data, checkpoint=None))


def test_means_are_those_of_sums_in_float64_over_uneven_batches() -> None:
    points, scores = train()
    trained = [each for each in points if "train/index" in each]
    mean = sum(range(LENGTH)) / LENGTH
    assert [each["train/index"] for each in trained] == [mean, mean]
    assert [each["train/doubled"] for each in trained] == [2 * mean, 2 * mean]
    assert trained[0]["train/rare"] == 1.0
    squares = math.fsum(index**2 for index in range(LENGTH))
    assert scores == {"index": mean, "square": squares / (4 * 6)}
    validated = [each for each in points if "valid/index" in each]
    assert [each["valid/index"] for each in validated] == [mean, mean]


@pytest.mark.parametrize("replicas", [2, 3])
def test_any_processes_log_the_same_and_padding_counts_as_it_was_handed_out(replicas: int) -> None:
    expected = train(num_replicas=replicas, accumulation_steps=2)
    for each in run_ranks(train_in_rank, replicas, replicas):
        assert each == expected
    points, scores = expected
    assert scores["index"] == sum(range(LENGTH)) / LENGTH
    assert all(
        each["train/doubled"] == 2 * each["train/index"] for each in points if "train/index" in each
    )


def train_in_rank(rank: int, replicas: int) -> Any:
    return train(num_replicas=replicas, accumulation_steps=2)


def test_a_killed_run_logs_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    expected, _ = train(max_steps=9, print_frequency=4)
    first, _ = train(max_steps=5, print_frequency=4, chkpt_root=tmp_path)
    rest, _ = train(max_steps=9, print_frequency=4, chkpt_root=tmp_path)
    assert [each for each in first + rest if "train/index" in each] == [
        each for each in expected if "train/index" in each
    ]


class Bad(Net):
    value: Any = "high"
    weight: Any = None

    def train_step(self, batch: Any) -> Any:
        self.log("it", self.value, self.weight)
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("value", "weight", "kind", "text"),
    [
        ("high", None, ArgumentTypeError, "a number or a tensor of one element"),
        (torch.ones(2), None, ArgumentTypeError, r"\(2,\)"),
        (1.0, -1, ArgumentError, "a finite number of at least 0"),
    ],
)
def test_what_is_no_number_is_refused(
    value: Any, weight: Any, kind: type[Exception], text: str
) -> None:
    model = Bad()
    model.value, model.weight = value, weight
    with pytest.raises(kind, match=text):
        helios.Trainer(max_epochs=1, use_cpu=True).fit(model, make_data())


def test_outside_of_a_step_the_error_names_what_logs_there() -> None:
    class Early(Net):
        def on_training_start(self) -> None:
            self.log("early", 1.0)

    with pytest.raises(UsageError, match=r"self\.context\.log"):
        helios.Trainer(max_epochs=1, use_cpu=True).fit(Early(), make_data())
    with pytest.raises(UsageError, match=r"self\.context\.log"):
        Net().log("never", 1.0)


def test_a_log_of_ones_own_counts_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(helios.Model):
        def setup(self) -> None:
            self.net = nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-5)
            self.log: Any = print

        def train_step(self, batch: Any) -> Any:
            self.log("hello", end="")
            return self.net(batch[:, None]).square().mean()

    assert helios.Trainer(max_epochs=1, use_cpu=True).fit(Own(), make_data())
    said = capsys.readouterr()
    assert "hello" in said.out
    assert said.err.count("Own overrides log") == 1

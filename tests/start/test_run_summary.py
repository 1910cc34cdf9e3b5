"""What the banner says of model and data."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from helios import DataLoaderParams, DataModule, Model, Plugin, Trainer
from helios.start.run_log import describe_model


class Holder(Model):
    def __init__(self, **members: object) -> None:
        super().__init__("holder")
        for name, member in members.items():
            setattr(self, name, member)

    def setup(self, fast_init: bool = False) -> None:
        """Do nothing: the members are there."""


def lines(**members: object) -> list[str]:
    return describe_model(Holder(**members)).splitlines()


@pytest.mark.shows("P77")
def test_one_network_is_shown_by_its_parts() -> None:
    network = nn.Sequential(nn.Linear(1000, 2), nn.ReLU(), nn.Linear(2, 1).double())
    assert lines(net=network) == [
        "2,005 parameters (7.8 KiB), all trainable",
        "  net.0  Linear  2,002",
        "  net.2  Linear      3",
    ]


@pytest.mark.shows("P77")
def test_a_shared_parameter_counts_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    assert lines(first=first, second=second) == [
        "6 parameters (24 bytes), all trainable",
        "  first   Linear  4",
        "  second  Linear  2",
    ]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield torch.ones(1)


class Data(DataModule):
    def setup(self) -> None:
        data, params = TensorDataset(torch.ones(2500, 1)), DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(data, params)
        self._valid_dataset = self._create_dataset(Endless(), DataLoaderParams(batch_size=3))


class Small(Holder):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch, state):  # type: ignore[no-untyped-def]
        return self.net(batch[0]).sum()


@pytest.mark.shows("P77")
def test_the_banner_says_how_large_model_and_data_are(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(train_unit="iteration", total_steps=1, use_cpu=True).fit(Small(), Data())
    shown = capsys.readouterr().err.splitlines()
    place = shown.index("model: 2 parameters (8 bytes), all trainable")
    assert shown[place + 1 : place + 3] == [
        "  net  Linear  2",
        "data: 2,500 samples in 1,250 batches per epoch; validation an unknown number of samples",
    ]


class Numbered(DataModule):
    """Ten samples in batches, or what else a test gives."""

    def __init__(self, data: object, **params: object) -> None:
        super().__init__()
        self.data, self.params = data, params

    def setup(self) -> None:
        params = DataLoaderParams(**{"batch_size": 2, **self.params})
        self._train_dataset = self._create_dataset(self.data, params)
        self._valid_dataset = self._create_dataset(TEN, DataLoaderParams(batch_size=5))


TEN = TensorDataset(torch.ones(10, 1))


class Stopped(Plugin):
    """Ends the run before its first step."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_fit_start(self) -> None:
        raise InterruptedError


def plan(capsys: pytest.CaptureFixture[str], data: DataModule, **options: object) -> str:
    trainer = Trainer(use_cpu=True, plugins=[Stopped("stopped")], **options)
    trainer.train_exceptions.append(InterruptedError)
    with pytest.raises(InterruptedError):
        trainer.fit(Small(), data)
    (line,) = [row for row in capsys.readouterr().err.splitlines() if row.startswith("plan: ")]
    return line.removeprefix("plan: ")


@pytest.mark.parametrize(
    ("options", "params", "text"),
    [
        (
            {"total_steps": 20},
            {},
            "20 epochs of 5 steps (batch 2), fp32, not validated, nothing is saved (chkpt_root)",
        ),
        (
            {"total_steps": 1, "accumulation_steps": 4, "num_replicas": 2, "precision": "bf16"},
            {},
            "1 epoch of 1 step (batch 2 x 4 x 2 replicas), bf16, not validated, nothing is saved "
            "(chkpt_root)",
        ),
        (
            {"total_steps": 1, "valid_frequency": 1, "chkpt_frequency": 1, "chkpt_root": "runs"},
            {"drop_last": True, "batch_size": 3},
            "1 epoch of 3 steps (batch 3), fp32, validated every epoch, saved every epoch",
        ),
        (
            {"total_steps": math.inf, "early_stop_cycles": 2, "valid_frequency": 3},
            {},
            "unlimited epochs of 5 steps (batch 2), fp32, validated every 3 epochs, nothing is "
            "saved (chkpt_root)",
        ),
    ],
)
def test_the_banner_has_the_plan_of_the_run_in_a_line(
    options: dict[str, object],
    params: dict[str, object],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(capsys, Numbered(TEN, **params), **options) == text

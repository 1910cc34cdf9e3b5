"""Runs without training data: resumed anywhere, with validation data, and what defines them."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helios import DataModule, Model, Trainer
from helios.data import Steps
from helios.errors import RunMismatchError
from helios.ledger import verify
from helios.plugins import CSVLogger
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Outcome, Setting, train


class Logging(Model):
    """Logs the number of each step, without a weight."""

    def setup(self) -> None:
        self.network = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def train_step(self, batch: int) -> Tensor:
        self.log("number", batch)
        return self.network(torch.ones(1)).sum()


class Numbers(DataModule):
    def setup(self) -> None:
        self.train_dataset = Steps(4)


class StepsModule(IndexModule):
    """Validation data, and a number of training steps."""

    def __init__(self, setting: Setting, n: int | None = None) -> None:
        super().__init__(setting)
        self.n = n

    def setup(self) -> None:
        super().setup()
        self._train_dataset = Steps(self.n)


def make_setting(n: int | None = None, **more: object) -> Setting:
    options = {"total_steps": 9, "make_data": partial(StepsModule, n=n), **more}
    return Setting(**options)  # type: ignore[arg-type]


@pytest.mark.shows("P55")
@pytest.mark.parametrize("n", [None, 4])
def test_a_run_without_data_resumes_everywhere(tmp_path: Path, n: int | None) -> None:
    setting = make_setting(n, accumulation=2)

    def run(folder: Path) -> Outcome:
        return train(folder, setting)

    whole = resume_everywhere(run, tmp_path)
    assert [ids for ids, _ in whole.records.values()] == [[i] * 4 for i in range(18)]
    assert ("on_validation_end", 0) in whole.events
    assert verify(tmp_path / "whole" / "small").is_good


@pytest.mark.shows("P55")
@pytest.mark.parametrize(("before", "now"), [(None, 4), (4, 5)])
def test_another_length_of_epochs_is_refused_until_it_is_allowed(
    tmp_path: Path, before: int | None, now: int | None
) -> None:
    setting = make_setting(before, total_steps=3)
    train(tmp_path, setting)
    other = dataclasses.replace(make_setting(now), total_steps=6)
    with pytest.raises(RunMismatchError, match="length: "):
        train(tmp_path, other)
    other.options["allow_changes"] = ("length",)
    assert sorted(train(tmp_path, other).records) == [4, 5, 6]


def test_a_number_that_a_step_logs_weighs_one(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    plugins = [CSVLogger(log)]
    Trainer(max_steps=4, print_frequency=4, plugins=plugins, use_cpu=True).fit(Logging(), Numbers())
    with log.open() as lines:
        assert "1.5" in [
            row["value"] for row in csv.DictReader(lines) if row["name"] == "train/number"
        ]

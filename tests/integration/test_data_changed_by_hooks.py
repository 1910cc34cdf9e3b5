"""What the last hook before a pass changes in a data set reaches loader workers at once.

Losses have the samples in them, so equal ledgers are equal samples; these are compared by bytes
besides.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.ledger.book import FILE_NAME
from helios.state import TrainingState
from tests.support.ranks import run_ranks

# Machines with few processors would have fewer workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BATCH_SIZE = 2
STEPS = 2
"""Steps of an epoch."""


class Changing(Dataset[torch.Tensor]):
    """Samples that know in which version of the data they were fetched, with augmentation."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.length = STEPS * BATCH_SIZE * num_replicas
        self.version = 0

    def __len__(self) -> int:
        return self.length

    def change(self, version: int) -> None:
        """Become another data set."""
        self.version = version

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.version, float(torch.rand(1))])


@dataclasses.dataclass(frozen=True)
class Setting:
    num_workers: int = 0
    num_replicas: int = 1


class Data(helios.DataModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    def setup(self) -> None:
        setting = self.setting
        self.train, self.valid = (Changing(setting.num_replicas) for _ in range(2))
        params = helios.DataLoaderParams(
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=setting.num_workers,
            multiprocessing_context="fork" if setting.num_workers else None,
        )
        self._train_dataset = self._create_dataset(self.train, params)
        self._valid_dataset = self._create_dataset(self.valid, params)


class Model(helios.Model):
    """Writes each batch that it gets into ``<folder>/seen-<rank>.jsonl``, and changes the data."""

    unsaved = ("data", "folder")

    def __init__(self, data: Data, folder: Path) -> None:
        super().__init__("model")
        self.data, self.folder = data, folder

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.001)

    def on_training_epoch_start(self, current_epoch: int) -> None:
        super().on_training_epoch_start(current_epoch)
        self.data.train.change(current_epoch)

    def on_training_resume(self, state: TrainingState) -> None:
        super().on_training_resume(state)
        self.data.train.change(state.global_epoch)

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.data.valid.change(10 + validation_cycle)

    def _write(self, batch: torch.Tensor, *place: Any) -> None:
        line = [*place, self.trainer._parts.runner.replica, batch.numpy().tobytes().hex()]
        with (self.folder / f"seen-{self.trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def train_step(self, batch: torch.Tensor, state: TrainingState) -> torch.Tensor:
        self._write(batch, "train", state.global_iteration)
        return self.net(batch).square().mean()

    def valid_step(self, batch: torch.Tensor, step: int) -> dict[str, tuple[Any, Any]]:
        run = self.trainer._parts.run
        self._write(batch, run.phase.value, run.state.global_iteration, step)
        return {"score": (batch.sum(), len(batch))}


def make_trainer(folder: Path, setting: Setting, **options: Any) -> helios.Trainer:
    usual: dict[str, Any] = {
        "train_unit": "iteration",
        "total_steps": 5,
        "valid_frequency": 2,
        "chkpt_root": folder,
        "chkpt_frequency": 1,
        "num_replicas": setting.num_replicas,
        "use_cpu": True,
        "print_banner": False,
    }
    return helios.Trainer(**{**usual, **options})


def train(folder: Path, setting: Setting, **options: Any) -> helios.Trainer:
    """Train in a folder, from what lies there."""
    folder.mkdir(exist_ok=True)
    trainer, data = make_trainer(folder, setting, **options), Data(setting)
    trainer.fit(Model(data, folder), data)
    return trainer


def read(folder: Path) -> tuple[dict[tuple[Any, ...], str], bytes]:
    """Return the batches of a run by place, and its ledger; what came twice must be equal."""
    found: dict[tuple[Any, ...], str] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            *place, batch = json.loads(line)
            assert found.setdefault(tuple(place), batch) == batch
    return found, (folder / "model" / FILE_NAME).read_bytes()


def versions(folder: Path, phase: str = "train") -> list[int]:
    """Return the version of the data in each batch of a phase, in order."""
    batches = [(place, batch) for place, batch in read(folder)[0].items() if place[0] == phase]
    numbers = [
        torch.frombuffer(bytearray.fromhex(batch), dtype=torch.float32).view(-1, 3)[:, 1]
        for _, batch in sorted(batches)
    ]
    assert all(len(set(each.tolist())) == 1 for each in numbers)
    return [int(each[0]) for each in numbers]


@pytest.mark.shows("P143")
def test_workers_get_what_the_start_of_an_epoch_and_of_a_validation_change(tmp_path: Path) -> None:
    for count in (0, 2):
        train(tmp_path / str(count), Setting(num_workers=count))
    assert read(tmp_path / "2") == read(tmp_path / "0")
    assert versions(tmp_path / "0") == [1, 1, 2, 2, 3]
    assert set(versions(tmp_path / "0", "validation")) == {10, 11}


def _work(rank: int, folder: Path, setting: Setting) -> None:
    train(folder, setting)


@pytest.mark.shows("P143")
def test_processes_and_their_workers_get_it_too(tmp_path: Path) -> None:
    setting = Setting(num_replicas=2)
    train(tmp_path / "whole", setting)
    folder = tmp_path / "resumed"
    train(folder, setting, total_steps=3)
    run_ranks(_work, 2, folder, dataclasses.replace(setting, num_workers=2))
    assert read(folder) == read(tmp_path / "whole")

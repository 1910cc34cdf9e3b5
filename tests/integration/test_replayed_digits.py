"""Replays of a run over several processes: from each checkpoint, on other numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.ledger import Replay
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.ledger.test_replay import contents
from tests.support.resume import iteration_of

pytestmark = pytest.mark.full


class Digits(helios.DataModule):
    """The digits of scikit-learn: 8 by 8 pixels, 1,500 for training."""

    def setup(self) -> None:
        datasets = pytest.importorskip("sklearn.datasets")
        images, labels = datasets.load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        params = helios.DataLoaderParams(batch_size=25, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x[:1500], y[:1500]), params)
        params = helios.DataLoaderParams(batch_size=100)
        self._valid_dataset = self._create_dataset(TensorDataset(x[1500:], y[1500:]), params)


class Classifier(helios.Model):
    """Dropout and BatchNorm, and a sum that is long enough to be split over threads."""

    def setup(self, *, fast_init: bool = False) -> None:
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss = loss + 1e-6 * long_sum(self.net[0].weight)
        self.loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        x, y = batch
        return {"accuracy": ((self.net(x).argmax(1) == y).sum(), len(y))}


def long_sum(weights: torch.Tensor) -> torch.Tensor:
    return (weights.reshape(-1, 1) * torch.sin(torch.arange(256.0))).flatten().square().sum()


def _make_trainer(folder: Path, *plugins: Plugin, **options: Any) -> helios.Trainer:
    given: dict[str, Any] = {
        "total_steps": 3,
        "valid_frequency": 1,
        "chkpt_frequency": 1,
        "chkpt_root": folder,
        "use_cpu": True,
        "print_banner": False,
        "plugins": plugins,
    }
    return helios.Trainer(**given | options)


def _replay(trainer: helios.Trainer, **part: int) -> Replay:
    return trainer.replay(Classifier("digits"), Digits(), **part)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run over four processes."""
    folder = tmp_path_factory.mktemp("digits")
    assert _make_trainer(folder, num_replicas=4, nproc=4).fit(Classifier("digits"), Digits())
    return folder


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_a_run_of_four_processes_is_repeated_on_any_number(nproc: int, digits: Path) -> None:
    before = contents(digits)
    checkpoints = sorted(digits.glob("*/*.pth"), key=iteration_of)
    assert len(checkpoints) == 3
    for start in (0, *map(iteration_of, checkpoints[:-1])):
        found = _replay(_make_trainer(digits, nproc=nproc), start=start)
        assert (found.is_equal, found.begins_after, found.num_equal) == (True, start, 45)
        assert found.has_ended
    assert contents(digits) == before

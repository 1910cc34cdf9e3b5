"""The form that the README shows, with default frequencies: killed, and on other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from helios import DataModule, Model, Trainer
from tests.support.kills import run_in_child
from tests.support.ranks import run_ranks

LENGTH = 26


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index / LENGTH])


class Net(Model):
    unsaved = ("dies_at", "seen")

    def __init__(self, dies_at: int = -1) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.seen: list[float] = []

    def setup(self) -> None:
        self.network = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)

    def train_step(self, batch: Any) -> Any:
        self.seen += batch.flatten().tolist()
        loss = functional.mse_loss(self.network(batch), batch.sin())
        self.log("doubled", 2 * loss)
        if self.context.state.global_iteration == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def valid_step(self, batch: Any) -> None:
        self.log("error", functional.mse_loss(self.network(batch), batch.sin()).double())


def train(rank: int, folder: Path, dies_at: int = -1, **options: Any) -> tuple[bytes, float]:
    data = DataModule.from_datasets(train=Indices(), valid=Indices(), batch_size=2)
    given: dict[str, Any] = {"max_epochs": 5, "num_replicas": 3, "chkpt_root": folder}
    trainer = Trainer(**{**given, "use_cpu": True, "print_banner": False, **options})
    model = Net(dies_at)
    trainer.fit(model, data)
    weights = torch.cat([each.detach().flatten() for each in model.network.parameters()])
    return weights.numpy().tobytes(), trainer.validate(model, data)["error"]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_run_with_defaults_is_killed_and_goes_on_with_the_same_bits(
    processes: int, tmp_path: Path
) -> None:
    expected = train(0, tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    for dies_at in (7, 12, 19):
        code = run_in_child(lambda at=dies_at: train(0, folder, at), tmp_path / "none")  # type: ignore[misc]
        assert code == -signal.SIGKILL
    found = run_ranks(train, processes, folder)
    assert found == [expected] * processes

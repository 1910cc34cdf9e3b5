"""A model and its data for command lines, and a script that trains them.

``KILL_AT`` in the environment is the iteration in which the process kills itself, once there is a
checkpoint; rank 1 does, where there are two.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios


class Data(helios.DataModule):
    """Points of a curve.

    Args:
        batch_size: samples of a batch.
        length: samples in total.
    """

    made: ClassVar[list[str]] = []

    def __init__(self, batch_size: int = 4, length: int = 32, token: str = "") -> None:
        super().__init__()
        self.made.append("data")
        self.batch_size, self.length = batch_size, length

    def setup(self) -> None:
        x = torch.linspace(-1, 1, self.length).unsqueeze(1)
        data = TensorDataset(x, x.sin())
        self.train_dataset = self.create_dataset(data, batch_size=self.batch_size, shuffle=True)
        for name in ("valid_dataset", "test_dataset", "predict_dataset"):
            setattr(self, name, self.create_dataset(data, batch_size=self.batch_size))


class Net(helios.Model):
    """A small network.

    Args:
        width: its width.
        lr: the learning rate.
    """

    def __init__(self, width: int = 6, lr: float = 0.01, save_name: str = "net") -> None:
        super().__init__(save_name)
        Data.made.append("model")
        self.width, self.lr = width, lr

    def setup(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(1, self.width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(self.width, 1)
        )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.lr)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        is_last = self.global_rank == int(os.environ.get("WORLD_SIZE", 1)) - 1
        if is_last and state.global_iteration == int(os.environ.get("KILL_AT", -1)):
            while not [*Path("runs").rglob("*.pth")]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def valid_step(self, batch: Any) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.net(x), y))

    def predict_step(self, batch: Any) -> torch.Tensor:
        predicted: torch.Tensor = self.net(batch[0])
        return predicted


def train() -> None:
    helios.run(Net, Data, chkpt_root="runs", use_cpu=True)


if __name__ == "__main__":
    train()

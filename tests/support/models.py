"""Small models for tests to build on, each with one network and one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import helios
from helios.model.processor import BatchProcessor
from helios.state import TrainingState


class Fitting(helios.Model):
    """Learns to answer with zeros."""

    rate = 0.1
    part = 0

    def __init__(self, save_name: str = "net") -> None:
        super().__init__(save_name)

    def setup(self, fast_init: bool = False) -> None:
        self.net = self.make_net()
        self.optimizer = self.make_optimizer()

    def make_net(self) -> nn.Module:
        return nn.Linear(5, 1)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=self.rate)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return self.net(batch[self.part]).square().mean()


def forward(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model.net(batch)
    return outputs, outputs.square().mean()


class OneLayer(helios.Model):
    """One layer; its steps are those of a batch processor."""

    rate = 0.1

    def __init__(self, processor: BatchProcessor | None = None) -> None:
        super().__init__("linear")
        self.batch_processor = processor or BatchProcessor.from_callable(forward)

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        if not fast_init:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

"""The shortest that a user writes, with types: no argument that a step does not use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from helios import DataLoaderParams, DataModule, Model, Trainer

Batch: TypeAlias = tuple[Tensor, Tensor]


INPUTS = torch.arange(16, dtype=torch.float32).reshape(16, 1) / 16
DATA = TensorDataset(INPUTS, 2 * INPUTS)


class Numbers(DataModule):
    def setup(self) -> None:
        self.train_dataset = self.create_dataset(DATA, batch_size=4, shuffle=True)
        self.valid_dataset = {"a": self.create_dataset(DATA, DataLoaderParams(batch_size=4))}
        self.test_dataset = [self.create_dataset(DATA), self.create_dataset(DATA)]
        self.predict_dataset = self.create_dataset(DATA, num_workers=0, collate_fn=None)


def make_data() -> DataModule:
    return DataModule.from_datasets(
        train=DATA, valid=DATA, test=DATA, predict=DATA, batch_size=4, drop_last=True
    )


class Line(Model):
    def setup(self) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        loss = mse_loss(self.net(inputs), targets)
        self.loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        inputs, targets = batch
        return {"error": ((self.net(inputs) - targets).abs().sum(), len(inputs))}

    def predict_step(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs


class LineOfTwoSteps(Line):
    def test_step(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        return {"tested": self.valid_step(batch)["error"]}


class Pair(Model):
    def setup(self) -> None:
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.1)

    def train_step(self, batch: Batch) -> Iterator[Any]:
        inputs, targets = batch
        yield mse_loss(self.first(inputs), targets)
        yield mse_loss(self.second(inputs), targets)


def make_trainer(**options: Any) -> Trainer:
    return Trainer(total_steps=2, valid_frequency=1, print_banner=False, **options)


def train() -> tuple[Line, list[Tensor]]:
    model, trainer = Line(), make_trainer()
    trainer.fit(model, make_data())
    trainer.test(model, make_data())
    return model, trainer.predict(model, make_data())

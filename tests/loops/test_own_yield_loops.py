"""A loop of the user's that is built on the loop of steps that yield."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.loops import YieldLoop


class Around(YieldLoop):
    """Does nothing but call the loop that it is built on."""

    def advance(self, batch: Any) -> None:
        super().advance(batch)


class Yielding(helios.Model):
    def __init__(self) -> None:
        super().__init__("yielding")

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: Any) -> Any:
        inputs, wanted = batch
        yield (self.net(inputs) - wanted).square().mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        params = helios.DataLoaderParams(batch_size=8, shuffle=True)
        self._train_dataset = self._create_dataset(rows, params)


@pytest.mark.shows("L43")
def test_a_loop_around_it_keeps_the_gradients_of_all_micro_batches() -> None:
    weights = []
    for loop in (YieldLoop(), Around()):
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=4,
            accumulation_steps=3,
            use_cpu=True,
            print_banner=False,
        )
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
        model = Yielding()
        trainer.fit(model, Data())
        weights.append(model.net.weight.detach().clone())
    assert torch.equal(*weights)

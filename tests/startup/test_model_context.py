"""A model may have a ``context`` of its own, such as the length of one: the run leaves it alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from helios import DataLoaderParams, DataModule, Model, Trainer


class Data(DataModule):
    def setup(self) -> None:
        params = DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(TensorDataset(torch.ones(4, 1)), params)


@dataclasses.dataclass(eq=False)
class Windowed(Model):
    context: int = 8  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__init__("windowed")

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: Any) -> Any:
        self.context += 1
        return self.net(batch[0]).square().mean()


def _train(folder: Path, epochs: int) -> Windowed:
    model = Windowed()
    trainer = Trainer(
        total_steps=epochs, chkpt_frequency=1, chkpt_root=folder, use_cpu=True, print_banner=False
    )
    assert trainer.fit(model, Data())
    return model


def test_a_context_of_the_users_is_kept_and_saved(tmp_path: Path) -> None:
    assert _train(tmp_path, 1).context == 10
    assert _train(tmp_path, 2).context == 12

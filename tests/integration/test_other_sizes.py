"""Layers of other sizes than in the checkpoint: the error says how to fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios import DataLoaderParams, Trainer
from helios.errors import StateError


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        params = DataLoaderParams(batch_size=4)
        self._train_dataset = self._create_dataset(TensorDataset(x), params)


class Net(helios.Model):
    def __init__(self, width: int, name: str, source: Path | None = None) -> None:
        super().__init__(name)
        self.width, self.source = width, source

    def setup(self, fast_init: bool = False) -> None:
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, self.width)
        if self.source is not None:
            helios.load_weights(self.source, self)
            self.head = nn.Linear(8, 5)
        self.optimizer = torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], 0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return self.head(self.body(batch[0])).square().mean()


class LoadsFirst(Net):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        if self.source is not None:
            helios.load_weights(self.source, self)


def make(root: Path, **options: Any) -> Trainer:
    return Trainer(
        total_steps=1,
        chkpt_frequency=1,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        **options,
    )


@pytest.mark.parametrize("way", ["load_weights", "resume", "start", "test"])
def test_the_error_for_another_head_says_how_to_fine_tune(way: str, tmp_path: Path) -> None:
    make(tmp_path).fit(Net(3, "first"), Data())
    path = helios.find_last_checkpoint(tmp_path / "first")
    assert path is not None
    name = "first" if way in ("resume", "test") else "second"
    other = Net(5, name)
    if way == "load_weights":
        other = LoadsFirst(3, name, path)
    trainer = make(tmp_path, resume=path if way == "start" else "auto")
    shapes = r"of another shape: head\.weight: \(3, 8\) in the file, \(5, 8\) here.*skip="
    mismatch = r"size mismatch.*call helios\.load_weights\(\)"
    with pytest.raises(StateError, match=shapes if way == "load_weights" else mismatch):
        (trainer.test if way == "test" else trainer.fit)(other, Data())
    tuned, again = Net(3, "tuned", path), Net(3, "tuned", path)
    assert make(tmp_path).fit(tuned, Data())
    assert tuned.head.weight.shape == (5, 8)
    assert make(tmp_path).fit(again, Data()), "it resumes, too"
    assert torch.equal(tuned.head.weight, again.head.weight)

"""Parameters that ``setup`` orders anew in each process, as a set of names does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios.errors import UsageError
from helios.state import TrainingState
from tests.support.ranks import run_ranks

NAMES = ("first", "second", "third")


class Ordered(helios.Model):
    """Gives its optimizer parameters of one shape, in the order of names."""

    unsaved = ("order",)

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__("ordered")
        self.order = order

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.ModuleDict({name: nn.Linear(4, 4) for name in NAMES})
        weights = [self.net[name].weight for name in self.order]
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        return sum(self.net[name](batch[0]) for name in NAMES).square().mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        data = TensorDataset(torch.arange(64.0).reshape(16, 4).sin())
        self._train_dataset = self._create_dataset(data, helios.DataLoaderParams(batch_size=2))


def _refuse(rank: int, orders: list[tuple[str, ...]], folder: Path) -> str:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=4,
        num_replicas=2,
        chkpt_root=folder,
        chkpt_frequency=1,
        use_cpu=True,
        print_banner=False,
    )
    with pytest.raises(UsageError) as caught:
        trainer.fit(Ordered(orders[rank]), Data())
    return str(caught.value)


def test_an_order_of_each_process_is_refused_before_the_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(_refuse, 2, [NAMES, NAMES[::-1]], tmp_path)
    assert first == second
    assert "rank 1 has net.third.weight where rank 0 has net.first.weight" in first
    assert not list(tmp_path.rglob("*.pth"))

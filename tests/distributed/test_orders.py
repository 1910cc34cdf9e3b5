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

    def __init__(self, kind: str, order: tuple[str, ...]) -> None:
        super().__init__("ordered")
        self.kind = kind
        self.order = order

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(4)
        layers = {name: nn.Linear(4, 4) for name in NAMES}
        self.net = nn.ModuleDict(layers)
        self.scales = {name: nn.Parameter(torch.ones(4)) for name in NAMES}
        own = {"net": [layers[name].weight for name in self.order]}
        own["loose"] = [self.scales[name] for name in self.order]
        self.optimizer = torch.optim.SGD(own[self.kind], lr=0.1, momentum=0.9)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        x: Tensor = batch[0]
        for number, name in enumerate(NAMES):
            x = torch.tanh(self.net[name](x) * self.scales[name] + number)
        return x.square().mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        data = TensorDataset(torch.arange(64.0).reshape(16, 4).sin())
        self._train_dataset = self._create_dataset(data, helios.DataLoaderParams(batch_size=2))


def _refuse(rank: int, kind: str, orders: list[tuple[str, ...]], folder: Path) -> str:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=4,
        num_replicas=2,
        chkpt_root=folder,
        chkpt_frequency=1,
        clip_norm=0.01,
        use_cpu=True,
        print_banner=False,
    )
    with pytest.raises(UsageError) as caught:
        trainer.fit(Ordered(kind, orders[rank]), Data())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        ("net", "net.third.weight", "net.first.weight"),
        ("loose", "scales.third", "scales.first"),
    ],
)
def test_an_order_of_each_process_is_refused_before_the_first_step(
    kind: str, here: str, there: str, tmp_path: Path
) -> None:
    first, second = run_ranks(_refuse, 2, kind, [NAMES, NAMES[::-1]], tmp_path)
    assert first == second
    assert f"rank 1 has {here} where rank 0 has {there}" in first
    assert not list(tmp_path.rglob("*.pth"))

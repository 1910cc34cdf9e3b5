"""Parameters and buffers without a storage of their own: lazy layers and sparse buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.state import TrainingState
from tests.support.runs import digest

_SETTING: dict[str, Any] = {"use_cpu": True, "print_banner": False, "chkpt_frequency": 1}


class Numbers(helios.DataModule):
    def setup(self) -> None:
        data = [torch.full((3,), float(n)) for n in range(8)]
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(data, params)


class Lazy(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
        if not fast_init:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return (self.net(batch) - 1).square().mean()


class Sparse(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(3, 1)
        graph = torch.eye(3).to_sparse()
        self.net.register_buffer("graph", graph)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        mixed = torch.sparse.mm(self.net.graph, batch.T).T
        return (self.net(mixed) - 1).square().mean()


class Csr(Sparse):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.net.graph = self.net.graph.to_sparse_csr()


@pytest.mark.shows("S69")
@pytest.mark.parametrize("kind", [Lazy, Sparse, Csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_model_trains_with_checkpoints_and_resumes(kind: Any, tmp_path: Path) -> None:
    def fit(root: Path, total: int) -> Any:
        model = kind("odd")
        trainer = helios.Trainer(
            train_unit="iteration", total_steps=total, chkpt_root=root, **_SETTING
        )
        assert trainer.fit(model, Numbers())
        return model

    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "run", 3)
    resumed = fit(tmp_path / "run", 6)
    weights = [digest([p.detach() for p in model.net.parameters()]) for model in (whole, resumed)]
    assert weights[0] == weights[1]

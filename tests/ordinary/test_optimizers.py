"""Stock optimizers and schedulers, driven as their pages show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from helios.state import TrainingState
from tests.ordinary.harness import LENGTH, WIDTH, Case, Regression, assert_ordinary

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda net: optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda net: optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "AdamW of two groups": lambda net: optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
    "AdamW of named parameters": lambda net: optim.AdamW(net.named_parameters(), lr=0.01),
    "fused Adam": lambda net: optim.Adam(net.parameters(), lr=0.01, fused=True),
    "Adafactor": lambda net: optim.Adafactor(net.parameters()),
    "ASGD": lambda net: optim.ASGD(net.parameters(), t0=4),
    "RMSprop": lambda net: optim.RMSprop(net.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda net: optim.Rprop(net.parameters()),
}


class Optimized(Regression):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def make_optimizer(self, net: nn.Module) -> optim.Optimizer:
        return OPTIMIZERS[self.name](net)


@pytest.mark.shows("S43")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stock_optimizer_resumes_without_a_warning(name: str, tmp_path: Path) -> None:
    assert_ordinary(Case(lambda: Optimized(name)), tmp_path)


class ByLBFGS(Regression):
    """Steps by a closure, as LBFGS wants it."""

    def make_optimizer(self, net: nn.Module) -> optim.Optimizer:
        return optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)

    def train_step(self, batch: Any, state: TrainingState) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self._loss_items["loss"] = self.optimizer.step(closure).detach()


class Sparse(Regression):
    """An embedding with sparse gradients, and a dense rest: one optimizer each."""

    def setup(self, fast_init: bool = False) -> None:
        self.table = nn.Embedding(LENGTH + 1, WIDTH, sparse=True)
        self.net = self.make_net()
        self.sparse_optimizer = optim.SparseAdam(self.table.parameters(), lr=0.01)
        self.optimizer = optim.Adam(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> None:
        inputs, targets = batch
        places = (targets[:, 0] * LENGTH).round().long()
        loss = self.loss((inputs + self.table(places), targets))
        loss.backward()
        for optimizer in (self.sparse_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self._loss_items["loss"] = loss.detach()


@pytest.mark.parametrize("kind", [ByLBFGS, Sparse])
def test_an_optimizer_that_is_stepped_by_hand_resumes_without_a_warning(
    kind: type[Regression], tmp_path: Path
) -> None:
    assert_ordinary(Case(kind), tmp_path)


def _warm_up_then_decay(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=13),
    "SequentialLR": _warm_up_then_decay,
    "LambdaLR of a lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


class Scheduled(Regression):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.scheduler = SCHEDULERS[self.name](self.optimizer)


# PyTorch 2.6 warns of what its own SequentialLR does.
@pytest.mark.shows("S43")
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_stock_scheduler_resumes_without_a_warning(name: str, tmp_path: Path) -> None:
    assert_ordinary(Case(lambda: Scheduled(name)), tmp_path)


class OnPlateau(Regression):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.scheduler_interval = {"scheduler": "validation:loss"}
        self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)


def test_a_scheduler_that_follows_validation_resumes_without_a_warning(tmp_path: Path) -> None:
    case = Case(OnPlateau, options={"valid_frequency": 2})
    assert_ordinary(case, tmp_path)

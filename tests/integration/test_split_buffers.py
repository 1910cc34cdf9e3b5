"""Two names of one buffer that training splits: the run goes on, exactly or with a warning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.plugins import Plugin
from tests.support.killed_fits import fit, kill, missing


class Net(helios.Model):
    def __init__(self, split: Callable[[nn.Module], torch.Tensor]) -> None:
        super().__init__("net")
        self.split = split

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.net.register_buffer("scale", torch.ones(2))
        self.net.register_buffer("same", self.net.scale)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        if state.global_iteration == 2:
            self.net.scale = self.split(self.net)
        self.net.scale += 0.1
        self.net.same += 0.2
        factor = self.net.scale.sum() * self.net.same.sum()
        return (self.net(x) * factor - y).square().mean()


def _train(split: Callable[[nn.Module], torch.Tensor], root: Path, *plugins: Plugin) -> Any:
    model = Net(split)
    fit(model, root, *plugins, total_steps=12)
    return {name: value.numpy().tobytes() for name, value in model.net.state_dict().items()}


@pytest.mark.xfail(strict=True, reason="no start can load the checkpoint")
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(lambda net: net.scale.clone(), id="a copy"),
        pytest.param(lambda net: torch.cat([net.scale, torch.ones(1)]), id="grown"),
    ],
)
def test_buffers_that_training_splits_are_two_or_named_after_kills(
    split: Callable[[nn.Module], torch.Tensor], tmp_path: Path
) -> None:
    train = functools.partial(_train, split)
    whole, root = train(tmp_path / "whole"), tmp_path / "run"
    for iteration in (5, 9):  # the second resume is from a checkpoint of a resumed run
        kill(train, root, iteration)
    lacks = missing(root)
    assert train(root) == whole or lacks

"""What training does to state is exact after two kills, or the checkpoint names it; never neither.

The second resume is from a checkpoint that a resumed run has written.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import helios
from helios.plugins import Plugin
from tests.support.killed_fits import fit, kill, missing
from tests.support.quiet import Quiet


class Follower(Quiet):
    """Keeps what a row gives to it."""

    kept: Any = None
    net: Any = None

    def __init__(self) -> None:
        super().__init__("follower")


class Net(helios.Model):
    unsaved = ("follower",)

    def __init__(self, row: Row, follower: Follower) -> None:
        super().__init__("net")
        self.row, self.follower = row, follower

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.choices = {"first": torch.tanh, "second": torch.sigmoid}
        self.kept, self.other = self.row.make(self), None

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        factor = 1 + 0.01 * self.row.use(self, state.global_iteration)
        return (self.net(x) - y).square().mean() * factor


class Row(NamedTuple):
    """``make`` is called in setup; ``use`` in each step, for a number that moves the loss."""

    make: Callable[[Any], Any]
    use: Callable[[Any, int], float]


def _one_buffer(model: Any) -> None:
    model.net.register_buffer("scale", torch.ones(2))
    model.net.register_buffer("same", model.net.scale)


def _split(model: Any, now: int, change: Callable[[torch.Tensor], torch.Tensor]) -> float:
    if now == 2:
        model.net.scale = change(model.net.scale)
    model.net.scale += 0.1
    model.net.same += 0.2
    return float(model.net.scale.sum() * 2 + model.net.same.sum())


def _grow(buffer: torch.Tensor) -> torch.Tensor:
    return torch.cat([buffer, torch.ones(1)])


def _ones() -> list[int]:
    return [1]


def _fill(model: Any, now: int) -> float:
    model.kept[now % 3].append(now)
    return float(sum(map(sum, model.kept.values())))


def _refer_into_what_is_named(model: Any, now: int) -> float:
    if now == 2:
        model.kept = [{"count": 0}, iter(_ones())]
        model.other = model.kept[0]
    if model.other:
        model.other["count"] += 1
    return model.other["count"] if model.other else 0


def _refer_to_the_trainer(model: Any, now: int) -> float:
    if now == 2:
        model.kept = [model.trainer]
        model.other = model.kept[0]
    return now


def _choose_a_function(model: Any, now: int) -> float:
    if now == 2:
        model.follower.kept = model.choices["second"]
    return float(model.follower.kept(torch.tensor(now / 9))) if model.follower.kept else 0


def _make_a_network(model: Any, now: int) -> float:
    if now == 2:
        model.follower.net = nn.Linear(2, 2)
    if model.follower.net is not None:
        model.follower.net.weight.data.fill_(now)
    return now


def _nothing(model: Any) -> None:
    """Make nothing in setup."""


ROWS = {
    "a buffer that is split": Row(_one_buffer, functools.partial(_split, change=torch.clone)),
    "a buffer that is split and grows": Row(_one_buffer, functools.partial(_split, change=_grow)),
    "a defaultdict of a lambda": Row(lambda model: defaultdict(lambda: [1]), _fill),
    "a defaultdict of a function": Row(lambda model: defaultdict(_ones), _fill),
    "a reference into what is named": Row(_nothing, _refer_into_what_is_named),
    "a reference to a part of Helios": Row(_nothing, _refer_to_the_trainer),
    "a plugin chooses a function of the model": Row(_nothing, _choose_a_function),
    "a plugin makes a network named as the model's": Row(_nothing, _make_a_network),
}


def _train(row: Row, root: Path, *plugins: Plugin) -> list[bytes]:
    follower = Follower()
    model = Net(row, follower)
    fit(model, root, follower, *plugins, total_steps=12)
    return [value.numpy().tobytes() for value in model.net.state_dict().values()]


@pytest.mark.parametrize("row", ROWS)
def test_what_training_does_is_exact_or_named_after_kills(row: str, tmp_path: Path) -> None:
    train = functools.partial(_train, ROWS[row])
    whole, root = train(tmp_path / "whole"), tmp_path / "run"
    for iteration in (5, 9):
        kill(train, root, iteration)
    lacks = missing(root)
    assert train(root) == whole or lacks

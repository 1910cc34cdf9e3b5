"""What a run keeps of an optimizer, or of what loading replaces, is the same one after a kill.

All ways to keep something are in ``tests/state``; here the run is killed for real, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from tests.state.owners import bits
from tests.support import killed_fits
from tests.support.killed_fits import Sine
from tests.support.quiet import Quiet


class Net(helios.Model):
    """Two groups; a closure of setup halves the rate of the second one after each batch."""

    def __init__(self) -> None:
        super().__init__("net")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        groups = [{"params": self.net[place].parameters()} for place in (0, 2)]
        self.optimizer = torch.optim.Adam(groups, lr=0.1)
        group = self.optimizer.param_groups[1]

        def halve() -> None:
            group["lr"] *= 0.5

        self.halve = halve

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        super().on_training_batch_end(state, should_log)
        self.halve()


def _take_group(model: Net) -> Any:
    return model.optimizer.param_groups[0]


def _take_moment(model: Net) -> Any:
    return {"moment": model.optimizer.state[model.net[0].weight]["exp_avg"]}


def _take_entry(model: Net) -> Any:
    return model.optimizer.state[model.net[0].weight]


class Keeper(Quiet):
    """Keeps a part of the model's optimizer from the second iteration on, and changes it."""

    def __init__(self, take: Callable[[Net], Any]) -> None:
        super().__init__()
        self.take, self.kept = take, None

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        if state.global_iteration == 2:
            self.kept = self.take(self.context.model)
        if self.kept is not None:
            for value in self.kept.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value.mul_(0.5)
            if "lr" in self.kept:
                self.kept["lr"] *= 0.5


def _end_of(model: Net) -> Any:
    rates = [group["lr"] for group in model.optimizer.param_groups]
    return rates, [bits(part) for part in model.net.parameters()]


@pytest.mark.shows("S75")
@pytest.mark.parametrize("take", [_take_group, _take_moment, _take_entry])
def test_what_is_kept_is_the_same_after_a_kill(take: Any, tmp_path: Path) -> None:
    def train(root: Path, *plugins: helios.Plugin) -> Any:
        model = Net()
        killed_fits.fit(model, root, Keeper(take), *plugins)
        return _end_of(model)

    whole = train(tmp_path / "whole")
    assert whole[0][1] == 0.1 * 0.5**8  # 0.00039; 0.00625 if the group is a dead dict
    killed_fits.kill(train, tmp_path / "run", 5)
    assert train(tmp_path / "run") == whole
    assert killed_fits.missing(tmp_path / "run") == []


def test_what_is_kept_is_the_same_on_other_processes(tmp_path: Path) -> None:
    def train(root: Path, total: int, nproc: int) -> Any:
        options = {"num_replicas": 2, "nproc": nproc, "total_steps": total}
        killed_fits.fit(Net(), root, data=Sine(), **options)
        newest = helios.find_last_checkpoint(root / "net")
        assert newest is not None
        saved = helios.load_checkpoint(newest)
        return bits(saved["model"]["objects"]), killed_fits.missing(root)

    whole = train(tmp_path / "whole", 8, 1)
    train(tmp_path / "parted", 4, 1)
    assert train(tmp_path / "parted", 8, 2) == whole
    assert whole[1] == []

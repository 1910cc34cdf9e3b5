"""A process without a replica in the last turn repeats a step for the others, without a trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import helios
from tests.sharding.test_steps_of_users import fit
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.sharded import WIDTH, WORDS

NUM_ITERATIONS = 3  # as fit() trains
SHARED = torch.Generator().manual_seed(1)


class Draws(Quiet):
    """Draws a number in each step, from generators of its own."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since
        self.own = torch.Generator().manual_seed(1)
        self.others = [random.Random(1), np.random.default_rng(1)]

    def process_training_batch(self, batch: Any, state: helios.TrainingState) -> Any:
        if state.global_iteration >= self.since:
            torch.rand(1, generator=self.own)
            for each in self.others:
                each.random()
        return batch


class Moving(helios.Model):
    """A step moves attributes, objects, buffers and tensors, from some iteration on."""

    def __init__(self, since: int) -> None:
        super().__init__("steps")
        self.since = since

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH))
        self.net.register_buffer("calls", torch.zeros(()), persistent=False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.count, self.seen = 0, {"words": [0]}
        self.draws = torch.Generator().manual_seed(1)
        self.rows = torch.zeros(2, 3)
        self.row = self.rows[1]

    def shard(self) -> list[nn.Module | helios.Unit]:
        return [self.net[0]]

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        if state.global_iteration >= self.since:
            for each in (self.draws, SHARED):
                torch.rand(1, generator=each)
            self.net.calls += 1
            self.row += 1.0
            self.fresh = self.count = self.count + 1
            self.seen["words"].append(self.count)
        return self.net(batch[1]).square().mean() * (1 + self.count)


def _fit(rank: int, folder: Path, since: int) -> list[Any]:
    model, plugin = Moving(since), Draws(since)
    fit(rank, folder, model, "full", plugin, num_replicas=4)
    count, twins = model.count, (random.Random(1), np.random.default_rng(1))
    for twin, each in zip(twins, plugin.others, strict=True):
        assert [twin.random() for _ in range(count + 1)][-1] == each.random()
    assert model.rows.tolist() == [[0.0] * 3, [float(count)] * 3]
    assert model.seen["words"] == [*range(count + 1)]
    assert model.fresh == count
    again = torch.Generator().manual_seed(1)
    for _ in range(count):
        torch.rand(1, generator=again)
    assert again.get_state().equal(plugin.own.get_state())
    assert again.get_state().equal(model.draws.get_state())
    assert again.get_state().equal(SHARED.get_state())
    return [count, *(float(each.sum()) for each in model.net.buffers())]


@pytest.mark.shows("P86")
@pytest.mark.parametrize("since", [1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning:helios.*")
def test_a_repeated_step_changes_nothing(tmp_path: Path, since: int) -> None:
    found = run_ranks(_fit, 3, tmp_path, since)
    own = NUM_ITERATIONS + 1 - since
    assert [count for count, *_ in found] == [2 * own, own, own]
    assert found[0][1:] == found[1][1:] == found[2][1:]

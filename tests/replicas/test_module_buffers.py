"""Buffers of networks: a replica has its own in a window; then those of the first one count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helios.replicas.module_buffers import ReplicaBuffers
from helios.replicas.reduction_tree import blocks
from helios.replicas.replicas import Replicas
from tests.engines.joined import replicas_on
from tests.support.ranks import run_ranks
from tests.support.sums import bits

Contents = dict[str, tuple[torch.dtype, tuple[int, ...], bytes] | None]


class Memory(nn.Module):
    """Buffers that are replaced, filled late, hidden from the state, and counted in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_warm", torch.tensor(False))
        self.register_buffer("never", None)
        self.register_buffer("last", None)
        self.register_buffer("history", torch.zeros(0, 3))
        self.register_buffer("gone", torch.ones(2))

    def forward(self, batch: Tensor) -> Tensor:
        self.mean.mul_(0.7).add_(batch.mean(0) / 3)
        self.hidden = self.hidden * 0.9 + batch.std()
        self.count += len(batch)
        self.is_warm.fill_(self.count > 5)
        self.last = batch[-1].double()
        self.history = torch.cat([self.history, batch[:1]])[-3:]
        self.gone = None
        return batch + self.mean


class Networks:
    """A network with BatchNorm, which is used twice, and one of its own buffers."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(3, momentum=0.3)
        self.first = nn.Sequential(norm, Memory())
        self.second = nn.Sequential(norm, nn.BatchNorm1d(3, momentum=None))

    def all(self) -> list[nn.Module]:
        return [self.first, self.second]

    def step(self, replica: int, iteration: int) -> None:
        """Train on what a replica gets in an iteration."""
        draw = torch.Generator().manual_seed(100 * replica + iteration)
        with torch.no_grad():
            self.second(self.first(torch.randn(4, 3, generator=draw) * (1 + replica)))

    def contents(self) -> Contents:
        return {
            f"{place}.{name}.{key}": None
            if value is None
            else (value.dtype, tuple(value.shape), bits(value))
            for place, network in enumerate(self.all())
            for name, module in network.named_modules()
            for key, value in module._buffers.items()
        }


def exchange(
    replicas: Replicas, num_iterations: int, window: int
) -> dict[tuple[int, int], Contents]:
    """Train as the replicas of a process do, in windows; returns what is there after each turn."""
    seen: dict[tuple[int, int], Contents] = {}
    networks = Networks()
    buffers = ReplicaBuffers(replicas)
    buffers.find(networks.all())
    for iteration in range(num_iterations):
        if iteration % window == 0:
            buffers.begin_window()
        for replica in replicas.local_replicas:
            buffers.enter(replica)
            networks.step(replica, iteration)
            seen[replica, iteration] = networks.contents()
            buffers.leave(replica)
        if iteration % window == window - 1:
            buffers.commit()
            buffers.exchange()
        else:
            buffers.enter(replicas.local_replicas.start)
        seen[-1, iteration] = networks.contents()
    return seen


def expected_contents(replica: int, num_iterations: int, window: int) -> dict[int, Contents]:
    """Train one replica alone; in the beginning of each window it gets what the first one had."""
    own: dict[int, Contents] = {}
    present = Networks()
    for iteration in range(num_iterations):
        if iteration % window == 0 and replica:
            present = Networks()
            for before in range(iteration):
                present.step(0, before)
        present.step(replica, iteration)
        own[iteration] = present.contents()
    return own


def _train(
    rank: int, num_processes: int, num_replicas: int, num_iterations: int, window: int
) -> dict[tuple[int, int], Contents]:
    with replicas_on(rank, num_processes, num_replicas) as here:
        return exchange(here, num_iterations, window)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize(("num_replicas", "window"), [(3, 1), (3, 2), (4, 2), (5, 3)])
def test_each_replica_has_its_own_in_a_window(
    num_replicas: int, window: int, num_processes: int
) -> None:
    num_iterations = 2 * window + 1
    places = blocks(num_processes, num_replicas)
    alone = [expected_contents(r, num_iterations, window) for r in range(num_replicas)]
    ranks = run_ranks(_train, num_processes, num_processes, num_replicas, num_iterations, window)
    for found, block in zip(ranks, places, strict=True):
        for iteration in range(num_iterations):
            for replica in block:
                assert found[replica, iteration] == alone[replica][iteration]
            is_end = iteration % window == window - 1
            # Inside of a window hooks see what the first replica of their process has.
            shown = alone[0] if is_end else alone[block.start]
            assert found[-1, iteration] == shown[iteration]

"""Buffers of networks: a replica has its own in a window; then those of the first one count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    replicas: Replicas, num_iterations: int, window: int, seen: Callable[[int, int, Contents], None]
) -> Contents:
    """Train as the replicas of a process do, in windows; returns what is there at the end."""
    networks = Networks()
    buffers = ReplicaBuffers(replicas)
    buffers.find(networks.all())
    for iteration in range(num_iterations):
        if iteration % window == 0:
            buffers.begin_window()
        for replica in replicas.local_replicas:
            buffers.enter(replica)
            networks.step(replica, iteration)
            seen(replica, iteration, networks.contents())
            buffers.leave(replica)
        if iteration % window == window - 1:
            buffers.commit()
            buffers.exchange()
        else:
            buffers.enter(replicas.local_replicas.start)
        seen(-1, iteration, networks.contents())
    return networks.contents()


def expected_contents(
    replica: int, num_iterations: int, window: int
) -> tuple[dict[int, Contents], Contents]:
    """Train one replica alone; in the beginning of each window it gets what the first one had."""
    own: dict[int, Contents] = {}
    committed = Networks()
    present = committed
    for iteration in range(num_iterations):
        if iteration % window == 0 and replica:
            present = Networks()
            for before in range(iteration):
                present.step(0, before)
        present.step(replica, iteration)
        own[iteration] = present.contents()
    return own, present.contents()


def _train(
    rank: int, num_processes: int, num_replicas: int, num_iterations: int, window: int
) -> tuple[dict[Any, Contents], Contents]:
    found: dict[Any, Contents] = {}

    def seen(replica: int, iteration: int, contents: Contents) -> None:
        found[replica, iteration] = contents

    with replicas_on(rank, num_processes, num_replicas) as here:
        end = exchange(here, num_iterations, window, seen)
    return found, end


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize(("num_replicas", "window"), [(3, 1), (3, 2), (4, 2), (5, 3)])
def test_each_replica_has_its_own_in_a_window(
    num_replicas: int, window: int, num_processes: int
) -> None:
    num_iterations = 2 * window + 1
    places = blocks(num_processes, num_replicas)
    alone = [expected_contents(r, num_iterations, window)[0] for r in range(num_replicas)]
    ranks = run_ranks(_train, num_processes, num_processes, num_replicas, num_iterations, window)
    for (found, _), block in zip(ranks, places, strict=True):
        for iteration in range(num_iterations):
            for replica in block:
                assert found[replica, iteration] == alone[replica][iteration]
            is_end = iteration % window == window - 1
            # Inside of a window hooks see what the first replica of their process has.
            shown = alone[0] if is_end else alone[block.start]
            assert found[-1, iteration] == shown[iteration]


def test_the_test_has_contents_that_differ() -> None:
    first, second = (expected_contents(replica, 1, 1)[1] for replica in (0, 1))
    untouched = Networks().contents()
    same = {name for name, value in first.items() if second[name] == value}
    # Counts are those of samples and batches; what was taken away is gone everywhere.
    counts = {"num_batches_tracked", "count", "is_warm", "never", "gone"}
    assert {name.rpartition(".")[2] for name in same} == counts
    assert untouched["0.1.gone"] is not None
    assert first["0.1.gone"] is None
    assert untouched["0.1.last"] is None
    assert first["0.1.last"] is not None


def test_a_module_that_is_used_twice_is_exchanged_once() -> None:
    networks = Networks()
    buffers = ReplicaBuffers(Replicas(2))
    buffers.find(networks.all())
    buffers.begin_window()
    norm = networks.first[0]
    for replica in range(2):
        buffers.enter(replica)
        assert norm.num_batches_tracked == 0
        networks.step(replica, 0)
        assert norm.num_batches_tracked == 2, "both networks have used it"
        buffers.leave(replica)
    buffers.commit()
    buffers.exchange()
    assert norm is networks.second[0]
    assert norm.num_batches_tracked == 2


def test_a_buffer_that_two_modules_hold_stays_one() -> None:
    shared = torch.zeros(2)
    networks = [nn.Module(), nn.Module()]
    for network in networks:
        network.register_buffer("shared", shared)
    buffers = ReplicaBuffers(Replicas(2))
    buffers.find(networks)
    buffers.begin_window()
    for replica in range(2):
        buffers.enter(replica)
        assert shared.tolist() == [0.0, 0.0]
        networks[0].shared += replica + 1
        buffers.leave(replica)
    buffers.commit()
    buffers.exchange()
    assert networks[0].shared is networks[1].shared is shared
    assert shared.tolist() == [1.0, 1.0]


def test_buffers_keep_their_memory() -> None:
    """Whoever holds one, an average of weights say, still holds the present one."""
    networks = Networks()
    held = dict(networks.first.named_buffers())
    buffers = ReplicaBuffers(Replicas(3))
    buffers.find(networks.all())
    buffers.begin_window()
    for replica in range(3):
        buffers.enter(replica)
        networks.step(replica, 0)
        buffers.leave(replica)
    buffers.commit()
    buffers.exchange()
    present = dict(networks.first.named_buffers())
    for name in ("0.running_mean", "0.num_batches_tracked", "1.mean", "1.count"):
        assert held[name] is present[name], name


def test_what_a_replica_has_computed_with_a_buffer_may_keep_its_graph() -> None:
    """An in-place exchange must not break the backward of the replica that had its turn."""
    network = nn.Module()
    network.register_buffer("scale", torch.ones(2))
    weight = nn.Parameter(torch.ones(2))
    buffers = ReplicaBuffers(Replicas(2))
    buffers.find([network])
    buffers.begin_window()
    for replica in range(2):
        buffers.enter(replica)
        (weight * network.scale).sum().backward()
        network.scale = (network.scale * weight).detach() * (replica + 2)
        buffers.leave(replica)
    buffers.commit()
    buffers.exchange()
    assert network.scale.tolist() == [2.0, 2.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


def test_a_window_without_a_turn_commits_what_is_there() -> None:
    networks = Networks()
    buffers = ReplicaBuffers(Replicas(2))
    buffers.find(networks.all())
    before = networks.contents()
    buffers.commit()
    buffers.exchange()
    assert networks.contents() == before
    # And what one window has left is no part of the next one.
    buffers.begin_window()
    buffers.enter(0)
    networks.step(0, 0)
    buffers.leave(0)
    buffers.commit()
    buffers.exchange()
    after = networks.contents()
    buffers.begin_window()
    buffers.enter(1)
    assert networks.contents() == after


def test_networks_without_buffers_are_left_alone() -> None:
    network = nn.Linear(2, 2)
    buffers = ReplicaBuffers(Replicas(2))
    buffers.find([network])
    buffers.begin_window()
    for replica in range(2):
        buffers.enter(replica)
        buffers.leave(replica)
    buffers.commit()
    buffers.exchange()
    assert dict(network.named_buffers()) == {}


class Growing(nn.Module):
    """A memory that grows by what a replica sees, and may be emptied or thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))
        self.register_buffer("rest", torch.zeros(2, dtype=torch.int64))

    def step(self, replica: int, iteration: int) -> None:
        size = (3 * replica + iteration) % 4
        self.queue = torch.full((size,), 10.0 * replica + iteration) if size else None
        self.rest += replica + 1

    def read(self) -> list[Any]:
        return [None if self.queue is None else self.queue.tolist(), self.rest.tolist()]


def _grow(rank: int, num_processes: int) -> list[Any]:
    with replicas_on(rank, num_processes, 3) as here:
        network = Growing()
        buffers = ReplicaBuffers(here)
        seen = []
        for iteration in range(6):
            if iteration % 3 == 0:
                buffers.find([network])
            buffers.begin_window()
            for replica in here.local_replicas:
                buffers.enter(replica)
                network.step(replica, iteration)
                buffers.leave(replica)
            buffers.commit()
            buffers.exchange()
            seen.append(network.read())
        return seen


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_buffers_may_have_other_shapes_on_other_replicas(num_processes: int) -> None:
    """A backend would fill a part of them, or end the process, if it were not told."""
    expected = [[[float(i)] * (i % 4) if i % 4 else None, [i + 1, i + 1]] for i in range(6)]
    assert run_ranks(_grow, num_processes, num_processes) == [expected] * num_processes

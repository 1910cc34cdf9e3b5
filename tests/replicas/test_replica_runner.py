"""What is drawn at a place depends on that place alone, and not on who runs which replica."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from helios.core import rng
from helios.core.loss_means import LossMeans
from helios.listeners import Iteration
from helios.replicas.reduction_tree import blocks
from helios.replicas.replica_runner import ReplicaRunner, SharedReplicaRunner
from helios.replicas.replicas import Replicas
from helios.state import TrainingState
from tests.engines.joined import replicas_on
from tests.support.ranks import run_ranks

Draw = tuple[float, float, float]


class Modules:
    def __init__(self, networks: tuple[nn.Module, ...]) -> None:
        self.networks = networks

    def modules(self) -> dict[str, nn.Module]:
        return {str(number): network for number, network in enumerate(self.networks)}


class Bare:
    """A model with networks and no losses."""

    def __init__(self, *networks: nn.Module) -> None:
        self._loss_items: dict[str, Any] = {}
        self.discovery = Modules(networks)


class Blind:
    """Watches nothing; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def is_due(self, iteration: int) -> bool:
        return False


class Silent:
    """Says nothing; its hooks leave the losses alone, or do not."""

    has_own_loops = False

    def __init__(self, *, keeps_losses: bool = True) -> None:
        self.keeps_losses = keeps_losses

    def announce(self, *, is_before_update: bool) -> tuple[bool, ...]:
        return ()

    def listen(self, flags: Sequence[bool]) -> None:
        assert not flags


class NoGradients:
    """Collects nothing."""

    def collect(self, *args: Any, **kwargs: Any) -> None:
        return


def runner_of(replicas: Replicas, seed: int, *networks: nn.Module) -> Any:
    iteration = Iteration(TrainingState(), LossMeans())
    if replicas.has_single_replica:
        return ReplicaRunner(seed, iteration)
    model: Any = Bare(*networks)
    parts: Any = (NoGradients(), iteration, Blind(), Silent())
    return SharedReplicaRunner(replicas, seed, model, *parts)


def update(runner: SharedReplicaRunner) -> None:
    """Go through what surrounds an update."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    runner.end_backward((optimizer,), {}, ends_window=True, updates=True)
    if runner.has_message:
        runner.receive()


def draw() -> Draw:
    """Draw from all three generators."""
    numpy = rng.get_default_numpy_rng().generator.normal()
    return torch.rand(()).item(), random.random(), float(numpy)


def from_key(*fields: int | str) -> Draw:
    """Return what is drawn first under a key."""
    with rng.stream(rng.key(*fields)):
        return draw()


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return


def go_through(
    runner: SharedReplicaRunner, block: range, iteration: int, *, ends_window: bool = True
) -> list:
    """Draw at every place of an iteration: before the turns, in each of them, and after them."""
    runner.begin_iteration(iteration)
    found: list[Draw | bool] = [draw()]
    for replica in block:
        runner.begin(replica, opens_window=ends_window)
        found.append(draw())
        runner.end(ends_window=ends_window)
    return [*found, draw()]


@pytest.mark.parametrize("seed", [0, 5])
def test_one_replica_has_one_key_an_iteration_and_no_other(seed: int) -> None:
    """The bits of a run of one replica are what they were before there were several."""
    runner = runner_of(Replicas(), seed)
    assert runner.is_first
    assert runner.is_last
    for iteration in (1, 2, 700, 3):
        with rng.stream(rng.key(seed, "train", iteration, 0)):
            expected = [draw() for _ in range(3)]
        runner.begin_iteration(iteration)
        found = [draw(), draw()]
        runner.begin_share(0, lambda replica: rng.reseed(0))
        runner.end_shares(lambda replica: rng.reseed(0))
        assert [*found, draw()] == expected, "nothing seeds again in between"


@pytest.mark.shows("H7")
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_what_is_drawn_follows_from_seed_iteration_and_replica(num_replicas: int) -> None:
    runner = runner_of(Replicas(num_replicas), 7)
    for iteration in (1, 2, 90, 4):
        block = range(num_replicas)
        expected = [from_key(7, "train", iteration, replica) for replica in block]
        before, *own, after = go_through(runner, block, iteration)
        assert own == expected
        assert before == from_key(7, "train", iteration, "before")
        assert after == from_key(7, "train", iteration, "after")
        assert len({before, *own, after}) == num_replicas + 2


def _draw_on_rank(rank: int, num_processes: int, num_replicas: int) -> list[list[Draw]]:
    rng.seed_rngs(rank)
    with replicas_on(rank, num_processes, num_replicas) as here:
        runner = runner_of(here, 3, nn.BatchNorm1d(2))
        return [
            go_through(runner, here.local_replicas, iteration, ends_window=iteration != 2)
            for iteration in (1, 2, 3)
        ]


@pytest.mark.shows("H7")
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_nothing_depends_on_who_carries_whom(num_processes: int) -> None:
    """Hooks draw the same everywhere, a replica what it draws anywhere."""
    ranks = run_ranks(_draw_on_rank, num_processes, num_processes, 4)
    for found, block in zip(ranks, blocks(num_processes, 4), strict=True):
        for place, iteration in enumerate((1, 2, 3)):
            before, *own, after = found[place]
            assert before == from_key(3, "train", iteration, "before")
            assert own == [from_key(3, "train", iteration, replica) for replica in block]
            assert after == from_key(3, "train", iteration, "after")


@pytest.mark.shows("H7")
def test_a_resume_draws_what_the_run_would_have_drawn() -> None:
    run = runner_of(Replicas(3), 9)
    drawn = [go_through(run, range(3), iteration) for iteration in (1, 2, 3)]
    assert go_through(runner_of(Replicas(3), 9), range(3), 3) == drawn[2]


def test_each_turn_has_the_buffers_of_its_replica() -> None:
    """Over a window of two iterations, then over one that is dropped."""
    network = nn.Module()
    network.register_buffer("total", torch.zeros(2))
    runner = runner_of(Replicas(2), 0, network)

    def iterate(iteration: int, *, opens: bool, ends: bool) -> list[float]:
        seen = []
        runner.begin_iteration(iteration)
        for replica in range(2):
            runner.begin(replica, opens_window=opens)
            network.total += 10.0**replica
            seen.append(network.total[0].item())
            runner.end(ends_window=ends)
        return [*seen, network.total[0].item()]

    assert iterate(1, opens=True, ends=False) == [1.0, 10.0, 1.0]
    assert iterate(2, opens=False, ends=True) == [2.0, 20.0, 2.0]
    assert iterate(3, opens=True, ends=True) == [3.0, 12.0, 3.0]
    assert iterate(4, opens=True, ends=False) == [4.0, 13.0, 4.0]
    runner.drop_window()
    assert iterate(5, opens=True, ends=True) == [5.0, 14.0, 5.0]


def _drop(rank: int, num_processes: int) -> list[float]:
    network = nn.Module()
    network.register_buffer("total", torch.zeros(1))
    with replicas_on(rank, num_processes, 3) as here:
        runner = runner_of(here, 0, network)
        runner.begin_iteration(1)
        for replica in here.local_replicas:
            runner.begin(replica, opens_window=True)
            network.total += 10.0**replica
            runner.end(ends_window=False)
        found = [network.total.item()]
        runner.drop_window()
        return [*found, network.total.item()]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_window_that_is_dropped_leaves_the_buffers_of_the_first_replica(
    num_processes: int,
) -> None:
    """On all processes: the data of one of them may have ended inside of a window."""
    ranks = run_ranks(_drop, num_processes, num_processes)
    expected = [[10.0**block.start, 1.0] for block in blocks(num_processes, 3)]
    assert ranks == expected

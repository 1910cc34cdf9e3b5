"""Turns of replicas, and sums of nodes in the order of the tree."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from helios.replicas.named_sums import NumberReducer
from helios.replicas.reduction_tree import tree_sum
from helios.sharding.sharded_gradients import NodeSums, Waves

COUNTS = [(v, p) for v in range(1, 10) for p in range(1, v + 1)]


@pytest.mark.parametrize(("num_replicas", "num_processes"), COUNTS)
def test_each_replica_has_one_turn_on_one_process(num_replicas: int, num_processes: int) -> None:
    trained = []
    for rank in range(num_processes):
        waves = Waves(num_replicas, num_processes, rank)
        for turn in itertools.count():
            waves.turn = turn
            if not waves.is_idle:
                trained.append(waves.replicas[rank])
            if waves.is_last:
                break
        assert waves.has_idle_turn is waves.is_idle
    assert sorted(trained) == [*range(num_replicas)]


def test_a_full_turn_of_a_power_of_two_can_be_halved() -> None:
    waves = Waves(num_replicas=8, num_processes=4, rank=0)
    assert waves.is_node
    # The tree over six replicas splits into three and three.
    assert not Waves(num_replicas=6, num_processes=4, rank=0).is_node
    assert not Waves(num_replicas=9, num_processes=3, rank=0).is_node


@pytest.mark.shows("P90")
@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_nodes_are_added_in_the_order_of_the_tree(num_replicas: int) -> None:
    leaves = [torch.randn(100) * 10.0 ** random.randint(-3, 3) for _ in range(num_replicas)]
    expected = tree_sum([leaf.clone() for leaf in leaves])
    order = [*range(num_replicas)]
    random.shuffle(order)
    sums = NodeSums(num_replicas)
    for replica in order:
        sums.add(range(replica, replica + 1), leaves[replica].clone())
    assert torch.equal(sums.take().view(torch.int32), expected.view(torch.int32))


def test_rows_of_waves_are_put_in_the_order_of_replicas() -> None:
    reducer = NumberReducer(5, num_processes=2, rank=0, in_waves=True)
    parts = [torch.tensor([[0], [2], [4]]), torch.tensor([[1], [3], [0]])]
    assert reducer._cut(parts).flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.shows("P90")
def test_few_sums_are_alive_between_turns() -> None:
    sums, most = NodeSums(16), 0
    for replica in range(16):
        sums.add(range(replica, replica + 1), torch.ones(1))
        most = max(most, len(sums._values))
    assert most <= 5
    assert sums.take() == 16


def test_values_of_a_buffer_that_is_freed_are_copied() -> None:
    sums, buffer = NodeSums(3), torch.ones(2, 4)
    sums.add(range(2, 3), buffer[0])
    sums.release_buffers([buffer])
    buffer.zero_()
    sums.add(range(1), torch.zeros(4))
    sums.add(range(1, 2), torch.zeros(4))
    assert torch.equal(sums.take(), torch.ones(4))

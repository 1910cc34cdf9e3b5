"""Turns of replicas, and sums of nodes in the order of the tree."""

from __future__ import annotations

import random

import pytest
import torch

from helios.replicas.named_sums import NumberReducer
from helios.replicas.reduction_tree import tree_sum
from helios.sharding.sharded_gradients import NodeSums


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

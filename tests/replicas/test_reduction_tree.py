"""The tree over replicas: one order of summation, however the replicas are divided."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from helios.replicas.reduction_tree import (
    TreeStack,
    block_of,
    blocks,
    finish,
    subtrees,
    tree_sum,
)
from tests.support.sums import by_definition

_SIZES = [(processes, v) for v in range(1, 26) for processes in range(1, v + 1)]


def spread_numbers(count: int, seed: int = 0) -> list[float]:
    """Return floats of so different magnitude that their sum depends on its order."""
    draw = random.Random(seed)
    return [draw.uniform(-1, 1) * 10 ** draw.uniform(-2, 2) for _ in range(count)]


@pytest.mark.parametrize(
    ("leaves", "shape"),
    [
        ("a", "a"),
        ("ab", "(ab)"),
        ("abc", "((ab)c)"),
        ("abcde", "(((ab)c)(de))"),
        ("abcdef", "(((ab)c)((de)f))"),
        ("abcdefg", "(((ab)(cd))((ef)g))"),
        ("abcdefgh", "(((ab)(cd))((ef)(gh)))"),
    ],
)
def test_a_node_splits_after_the_first_half_rounded_up(leaves: str, shape: str) -> None:
    assert tree_sum(list(leaves), lambda left, right: f"({left}{right})") == shape


def test_blocks_cover_all_replicas_in_order_and_differ_by_one_at_most() -> None:
    for num_processes, num_replicas in _SIZES:
        found = blocks(num_processes, num_replicas)
        assert list(itertools.chain(*found)) == list(range(num_replicas))
        sizes = {len(block) for block in found}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        for rank, block in enumerate(found):
            assert block_of(rank, num_processes, num_replicas) == block


def test_any_division_gives_the_bits_of_the_definition() -> None:
    for num_processes, num_replicas in _SIZES:
        columns = [spread_numbers(num_replicas, seed) for seed in range(8)]
        leaves = list(torch.tensor(columns).t().contiguous())
        expected = by_definition(leaves)
        nodes: dict[range, torch.Tensor] = {}
        for block in blocks(num_processes, num_replicas):
            stack: TreeStack[torch.Tensor] = TreeStack(block, num_replicas)
            for replica in block:
                stack.push(leaves[replica].clone())
            sums = stack.take()
            assert list(sums) == subtrees(block, num_replicas)
            nodes.update(sums)
        assert torch.equal(finish(nodes, num_replicas), expected)
        assert tree_sum(columns[0]).hex() == by_definition(columns[0]).hex()

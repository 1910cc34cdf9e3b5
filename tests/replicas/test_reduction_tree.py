"""The tree over replicas: one order of summation, however the replicas are divided."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from helios.errors import ArgumentError
from helios.replicas.reduction_tree import (
    TreeStack,
    add_values,
    block_of,
    blocks,
    finish,
    subtrees,
    tree_sum,
    waves,
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


@pytest.mark.parametrize("num_processes", [0, 5, -1])
def test_more_processes_than_replicas_are_refused(num_processes: int) -> None:
    with pytest.raises(ArgumentError, match=f"between 1 and num_replicas .4., got {num_processes}"):
        blocks(num_processes, 4)


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


def test_waves_that_are_added_turn_by_turn_give_the_bits_of_the_definition() -> None:
    """A turn has a block of neighbours, whose subtrees are added as those of a process are."""
    for num_processes, num_replicas in _SIZES:
        leaves = spread_numbers(num_replicas, seed=num_replicas)
        found = waves(num_processes, num_replicas)
        sums: dict[range, float] = {}
        for turn in range(len(found[0])):
            wave = [replicas[turn] for replicas in found if turn < len(replicas)]
            stack: TreeStack[float] = TreeStack(range(wave[0], wave[-1] + 1), num_replicas)
            for replica in wave:
                stack.push(leaves[replica])
            sums |= stack.take()
        assert finish(sums, num_replicas) == tree_sum(leaves)


def test_a_stack_adds_in_place_and_keeps_at_most_log2_buffers() -> None:
    for num_replicas in range(1, 70):
        buffers = [torch.full((2,), float(i)) for i in range(num_replicas)]
        stack: TreeStack[torch.Tensor] = TreeStack(range(num_replicas), num_replicas)
        most = 0
        for buffer in buffers:
            stack.push(buffer)
            most = max(most, len(stack._values))
        assert most <= max(1, math.ceil(math.log2(num_replicas)))
        ((_, total),) = stack.take().items()
        assert total is buffers[0]
        assert total[0] == sum(range(num_replicas))


def test_values_of_all_kinds_are_added_part_by_part() -> None:
    vector, number = torch.ones(2), torch.tensor(1.0)
    left = {"a": (1.5, 2), "vector": [vector, number], "left": (torch.tensor(3.0), 1)}
    right = {"a": (2.0, 1), "vector": [torch.ones(2), 2.0], "right": 5}
    total = add_values(left, right)
    assert total["a"] == (3.5, 3)
    assert total["vector"][0] is vector
    assert vector.tolist() == [2.0, 2.0]
    assert total["vector"][1].item() == 3.0
    assert number.item() == 1.0, "a number of the user is not changed"
    assert total["left"] == (torch.tensor(3.0), 1)
    assert total["right"] == 5
    with pytest.raises(ValueError, match="zip"):
        add_values((1, 2), (1, 2, 3))

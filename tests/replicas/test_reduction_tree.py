"""The tree over replicas: one order of summation, however the replicas are divided."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random

import pytest
import torch

from helios.errors import ArgumentError, UsageError
from helios.replicas.reduction_tree import (
    TreeStack,
    add_values,
    block_of,
    blocks,
    children,
    finish,
    subtrees,
    tree_sum,
    waves,
)
from tests.support.sums import by_definition

_SIZES = [(processes, v) for v in range(1, 41) for processes in range(1, v + 1)]


def spread_numbers(count: int, seed: int = 0) -> list[float]:
    """Return floats of so different magnitude that their sum depends on its order."""
    draw = random.Random(seed)
    return [draw.uniform(-1, 1) * 10 ** draw.uniform(-2, 2) for _ in range(count)]


def nodes_of(node: range) -> list[range]:
    """Return a node and all nodes below it."""
    if len(node) == 1:
        return [node]
    left, right = children(node)
    return [node, *nodes_of(left), *nodes_of(right)]


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


def test_neighbours_of_a_power_of_two_join_to_nodes_at_every_distance() -> None:
    for num_processes, num_replicas in _SIZES:
        if num_processes not in (1, 2, 4, 8, 16, 32):
            continue
        level = list(blocks(num_processes, num_replicas))
        while len(level) > 1:
            assert all(subtrees(block, num_replicas) == [block] for block in level)
            joined = [
                range(left.start, right.stop)
                for left, right in zip(level[::2], level[1::2], strict=True)
            ]
            assert [node for parent in joined for node in children(parent)] == level
            level = joined
        assert level == [range(num_replicas)]


def test_no_other_division_into_equal_blocks_has_fewer_subtrees() -> None:
    for num_processes, num_replicas in _SIZES:
        if num_replicas > 12:
            continue
        size, num_longer = divmod(num_replicas, num_processes)
        counts = []
        for longer in itertools.combinations(range(num_processes), num_longer):
            sizes = [size + (rank in longer) for rank in range(num_processes)]
            starts = [0, *itertools.accumulate(sizes)]
            pairs = itertools.pairwise(starts)
            counts.append(sum(len(subtrees(range(*pair), num_replicas)) for pair in pairs))
        found = blocks(num_processes, num_replicas)
        assert sum(len(subtrees(block, num_replicas)) for block in found) == min(counts)


def test_the_subtrees_of_a_block_cover_it_and_are_the_largest_inside_of_it() -> None:
    for num_replicas in range(1, 14):
        tree = nodes_of(range(num_replicas))
        for start, stop in itertools.combinations(range(num_replicas + 1), 2):
            found = subtrees(range(start, stop), num_replicas)
            assert list(itertools.chain(*found)) == list(range(start, stop))
            assert set(found) <= set(tree)
            inside = [node for node in tree if start <= node.start and node.stop <= stop]
            assert all(any(set(node) <= set(root) for root in found) for node in inside)


@pytest.mark.parametrize("num_processes", [0, 5, -1])
def test_more_processes_than_replicas_are_refused(num_processes: int) -> None:
    with pytest.raises(ArgumentError, match=f"between 1 and num_replicas .4., got {num_processes}"):
        blocks(num_processes, 4)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"rank must be between 0 and 2, got {rank}"):
        block_of(rank, 3, 4)


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


def test_waves_give_every_replica_to_one_process_and_neighbours_to_one_turn() -> None:
    for num_processes, num_replicas in _SIZES:
        found = waves(num_processes, num_replicas)
        assert sorted(itertools.chain(*found)) == list(range(num_replicas))
        for rank, replicas in enumerate(found):
            for turn, replica in enumerate(replicas):
                assert replica == turn * num_processes + rank
        assert {len(replicas) for replicas in found} <= {len(found[0]), len(found[0]) - 1}


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


@pytest.mark.parametrize("num_processes", [0, -1, 5])
def test_waves_of_more_processes_than_replicas_are_refused(num_processes: int) -> None:
    with pytest.raises(ArgumentError, match=r"num_processes must be between 1 and num_replicas"):
        waves(num_processes, 4)


def test_the_order_is_seen_in_the_bits() -> None:
    for count in range(4, 20):
        drawn = [spread_numbers(count, seed) for seed in range(20)]
        assert any(functools.reduce(operator.add, d) != tree_sum(d) for d in drawn), count


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


def test_a_stack_begins_anew_after_its_sums_are_taken() -> None:
    stack: TreeStack[float] = TreeStack(range(1, 4), 4)
    for first in (1.0, 10.0):
        for leaf in (first, first + 1, first + 2):
            stack.push(leaf)
        assert stack.take() == {range(1, 2): first, range(2, 4): 2 * first + 3}


def test_a_stack_that_lacks_leaves_or_gets_too_many_says_so() -> None:
    stack: TreeStack[float] = TreeStack(range(2, 4), 4)
    stack.push(1.0)
    with pytest.raises(UsageError, match="is missing the leaf of replica 3"):
        stack.take()
    stack.push(1.0)
    with pytest.raises(UsageError, match="has the leaves of all replicas"):
        stack.push(1.0)


def test_nodes_that_leave_a_replica_out_are_refused() -> None:
    with pytest.raises(UsageError, match="without replica 2"):
        finish({range(2): 1.0, range(3, 4): 1.0}, 4)


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

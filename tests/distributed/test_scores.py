"""Scores, losses and rows of all replicas have the same bits on any number of processes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from helios.errors import UsageError
from helios.replicas.named_sums import NumberReducer
from helios.replicas.reduction_tree import block_of, blocks
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

pytestmark = pytest.mark.full  # several processes: the second tier of the tests


def make_scores(replica: int, step: int) -> dict[str, tuple[Any, Any]]:
    """Return scores of a replica; in later steps and on other replicas there are other names."""
    draw = random.Random(10 * replica + step)
    value = draw.uniform(-1, 1) * 10 ** draw.uniform(-2, 2)
    scores: dict[str, tuple[Any, Any]] = {
        "loss": (torch.tensor(value, dtype=torch.float64), replica + 1)
    }
    if replica % 2:
        scores["odd"] = (value * 3, 0.1)
    if step >= 1 and replica == 3:
        scores["last"] = (value, 1)
    return {} if step == 2 else scores


def _sum_scores(rank: int, num_processes: int, num_replicas: int) -> list[Any]:
    reducer = NumberReducer(num_replicas, num_processes=num_processes, rank=rank)
    block = block_of(rank, num_processes, num_replicas)
    exchanges = []
    gather = reducer._ranks.gather_objects
    reducer._ranks.gather_objects = lambda value: exchanges.append(value) or gather(value)
    found: list[Any] = []
    for step in (0, 0, 1, 1, 2, 0):
        found.append(reducer.sum_scores([make_scores(replica, step) for replica in block]))
    losses = [{name: pair[0] for name, pair in make_scores(r, 1).items()} for r in block]
    means = reducer.mean_losses(losses)
    expected = 2 if num_processes > 1 else 0
    assert len(exchanges) == expected, "only new names take a further exchange"
    return [*found, {name: (mean.dtype, bits(mean)) for name, mean in means.items()}]


def scores_by_definition(num_replicas: int, step: int) -> dict[str, tuple[float, float]]:
    tables = [make_scores(replica, step) for replica in range(num_replicas)]
    names = sorted({name for table in tables for name in table})
    columns = {name: [table.get(name, (0.0, 0.0)) for table in tables] for name in names}
    return {
        name: (
            by_definition([float(total) for total, _ in pairs]),
            by_definition([float(weight) for _, weight in pairs]),
        )
        for name, pairs in columns.items()
    }


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_scores_and_losses_have_the_same_bits(num_processes: int) -> None:
    expected: list[Any] = [scores_by_definition(8, step) for step in (0, 0, 1, 1, 2, 0)]
    assert list(expected[2]) == ["last", "loss", "odd"]
    assert expected[4] == {}
    left_to_right = sum(float(make_scores(replica, 0)["loss"][0]) for replica in range(8))
    assert expected[0]["loss"][0] != left_to_right, "the order is seen in the bits"
    sums = {
        name: by_definition([float(s[name][0]) if name in s else 0.0 for s in scores])
        / sum(name in s for s in scores)
        for scores in [[make_scores(replica, 1) for replica in range(8)]]
        for name in ("last", "loss", "odd")
    }
    means = {name: (torch.float32, bits(torch.tensor(mean))) for name, mean in sums.items()}
    for found in run_ranks(_sum_scores, num_processes, num_processes, 8):
        assert found == [*expected, means]
        assert [list(scores) for scores in found] == [list(s) for s in [*expected, means]]


def _gather_rows(rank: int, num_processes: int, in_waves: bool) -> list[list[float]]:
    reducer = NumberReducer(5, num_processes=num_processes, rank=rank, in_waves=in_waves)
    block = block_of(rank, num_processes, 5, in_waves=in_waves)
    rows = torch.tensor([[replica, replica + 0.1] for replica in block], dtype=torch.float64)
    return reducer.gather(rows).tolist()


@pytest.mark.parametrize("in_waves", [False, True])
def test_rows_come_in_the_order_of_replicas(in_waves: bool) -> None:
    assert {len(block) for block in blocks(3, 5)} == {1, 2}
    expected = [[replica, replica + 0.1] for replica in range(5)]
    assert run_ranks(_gather_rows, 3, 3, in_waves) == [expected] * 3


def test_a_table_for_each_replica_is_asked_for() -> None:
    with pytest.raises(UsageError, match="each of the 2 replicas of this process, got 1"):
        NumberReducer(2).sum_scores([{}])

"""Means and sums over replicas: the tree decides their order, whoever carries which of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engines.joined import replicas_on
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition


def make_losses(replica: int, step: int) -> dict[str, Any]:
    """Return losses of so different magnitude that their mean shows the order of addition."""
    draw = random.Random(20 + replica)
    number = draw.uniform(-1, 1) * 10 ** draw.uniform(-2, 2)
    losses: dict[str, Any] = {"loss": torch.tensor([number], dtype=torch.float64)}
    if replica in (1, 4):
        losses["rare"] = 0.1 * replica
    return {**losses, "count": replica} if step else losses


def _table_numbers(rank: int, num_processes: int, num_replicas: int) -> list[Any]:
    with replicas_on(rank, num_processes, num_replicas) as here:
        means = [
            here.mean_losses([make_losses(replica, step) for replica in here.local_replicas])
            for step in (0, 1, 0)
        ]
        scores = [
            here.sum_scores(
                [
                    {name: (loss, replica + 1) for name, loss in make_losses(replica, step).items()}
                    for replica in here.local_replicas
                ]
            )
            for step in (0, 1)
        ]
        return [*[{n: (t.dtype, t.dim(), bits(t)) for n, t in m.items()} for m in means], *scores]


def _mean(step: int, name: str) -> tuple[torch.dtype, int, bytes]:
    tables = [make_losses(replica, step) for replica in range(5)]
    total = by_definition([float(table.get(name, 0.0)) for table in tables])
    mean = torch.tensor(total / sum(name in table for table in tables))
    return torch.float32, 0, bits(mean)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_means_and_sums_follow_the_tree(num_processes: int) -> None:
    losses = [float(make_losses(replica, 0)["loss"]) for replica in range(5)]
    assert by_definition(losses) != sum(losses), "the order is seen in the bits"
    expected_means = [
        {name: _mean(step, name) for name in ("count", "loss", "rare")[not step :]}
        for step in (0, 1, 0)
    ]
    for found in run_ranks(_table_numbers, num_processes, num_processes, 5):
        *means, first, second = found
        assert means == expected_means
        assert list(first) == ["loss", "rare"]
        assert list(second) == ["count", "loss", "rare"]
        assert first["loss"] == second["loss"] == (by_definition(losses), 15.0)
        assert first["rare"] == (by_definition([0.0, 0.1, 0.0, 0.0, 0.4]), 7.0)
        assert second["count"] == (10.0, 15.0)

"""Replicas: which of them a process carries, and what all processes agree on."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.replicas.replicas import Replicas
from tests.engines.joined import replicas_on
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

_PROCESSES = (1, 2, 3)


def test_a_run_has_one_replica_and_one_process_by_default() -> None:
    lone = Replicas()
    assert (lone.num_replicas, lone.num_processes, lone.rank) == (1, 1, 0)
    assert lone.local_replicas == range(1)
    assert lone.has_single_replica
    assert lone.has_single_process
    assert lone.has_one_per_process


def _agree(rank: int, num_processes: int) -> list[tuple[bool, ...]]:
    with replicas_on(rank, num_processes, num_processes) as here:
        is_last = rank == num_processes - 1
        return [
            here.agree(False, False),
            here.agree(rank == 0, is_last, False),
            here.agree(*(rank == other for other in range(num_processes))),
            here.agree(True),
        ]


@pytest.mark.shows("H36")
@pytest.mark.parametrize("num_processes", _PROCESSES)
def test_what_one_process_raises_is_raised_for_all(num_processes: int) -> None:
    expected = [(False, False), (True, True, False), (True,) * num_processes, (True,)]
    assert run_ranks(_agree, num_processes, num_processes) == [expected] * num_processes


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


@pytest.mark.parametrize("num_processes", _PROCESSES)
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


def make_tensors(rank: int) -> list[Tensor]:
    """Return tensors of many types, layouts and sizes; those of rank 0 are to be everybody's."""
    draw = torch.Generator().manual_seed(rank)
    grid = torch.randn(4, 6, generator=draw)
    return [
        grid,
        torch.randn(3, generator=draw).bfloat16(),
        torch.tensor(7 - rank),
        torch.tensor(rank == 0),
        torch.randn(2, 3, generator=draw, dtype=torch.complex64),
        torch.randn(5, 4, generator=draw).t(),
        torch.zeros(0, 3),
        torch.randn(1, 2, 3, 3, generator=draw).to(memory_format=torch.channels_last),
        torch.tensor([math.nan, -0.0, math.inf]) if rank == 0 else torch.ones(3),
        torch.randn(2, generator=draw, dtype=torch.float64),
    ]


def _copy(rank: int, num_processes: int) -> tuple[list[bytes], bool, list[bytes]]:
    with replicas_on(rank, num_processes, num_processes) as here:
        tensors = make_tensors(rank)
        strides = [tensor.stride() for tensor in tensors]
        parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
        here.copy_from_first([*tensors, parameter])
        here.copy_from_first([])
        is_kept = [tensor.stride() for tensor in tensors] == strides
        # A view is written through: others see it.
        whole = torch.full((3, 4), float(rank))
        here.copy_from_first([whole[:, 1]])
        return [bits(tensor) for tensor in [*tensors, parameter.detach()]], is_kept, [bits(whole)]


@pytest.mark.parametrize("num_processes", _PROCESSES)
def test_tensors_of_the_first_replica_become_everybodys(num_processes: int) -> None:
    expected = [bits(tensor) for tensor in [*make_tensors(0), torch.zeros(2)]]
    for rank, found in enumerate(run_ranks(_copy, num_processes, num_processes)):
        tensors, is_kept, (whole,) = found
        assert tensors == expected
        assert is_kept, "they stay where they lie"
        column = torch.full((3, 4), float(rank))
        column[:, 1] = 0.0
        assert whole == bits(column)


def test_one_process_may_carry_all_replicas() -> None:
    whole = Replicas(5)
    assert (whole.num_replicas, whole.num_processes, whole.local_replicas) == (5, 1, range(5))
    assert whole.has_single_process
    assert not whole.has_single_replica
    assert not whole.has_one_per_process
    assert whole.reducer.block == whole.local_replicas

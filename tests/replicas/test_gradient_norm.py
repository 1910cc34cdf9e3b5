"""The norm of gradients over rows: exact on any number of processes, and close to float64."""

from __future__ import annotations

import math

import pytest
import torch

from helios.replicas.gradients import _largest_of_rows, _row_squares, norm_by_rows

SHAPES = [(7, 5), (1, 3), (2,), (53, 11, 3), (1, 1), (4097,), (3, 0)]


def make_gradients(scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


@pytest.mark.shows("P90")
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_it_is_close_to_the_norm_in_float64(scale: float) -> None:
    gradients = make_gradients(scale)
    exact = math.sqrt(sum(each.double().square().sum().item() for each in gradients))
    assert norm_by_rows(gradients).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.shows("P90")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_shards_of_rows_give_the_same_bits(num_processes: int, norm_type: float) -> None:
    gradients = make_gradients()
    whole = norm_by_rows(gradients, norm_type=norm_type)
    measure = _row_squares if norm_type == 2.0 else _largest_of_rows
    parts = []
    for each in gradients:
        size = -(-each.shape[0] // num_processes)
        parts.append(torch.cat([measure(shard) for shard in each.split(size)]))
    values = torch.cat(parts)
    joined = values.max() if norm_type == math.inf else values.double().sum().sqrt().float()
    assert joined.view(torch.int32) == whole.view(torch.int32)

"""Checksums see every change that a training makes, and cost a fraction of a digest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helios.storage.content_hash import array_sum, tensor_sum, weighted_sum

_COUNT = 70_001


def _exchange(array: Any) -> None:
    array[3], array[-7] = float(array[-7]), float(array[3])


def _flip_two(array: Any) -> None:
    array[10], array[11] = -float(array[10]), -float(array[11])


def _add_and_take(array: Any) -> None:
    array[5] += 1
    array[6] -= 1


def _set_last(array: Any) -> None:
    array[-1] = 0


_CHANGES = [_exchange, _flip_two, _add_and_take, _set_last]


def _bytes_of(array: Any) -> Tensor:
    return torch.as_tensor(array).view(torch.uint8)


@pytest.mark.shows("S61")
@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize(
    "sum_of",
    [
        array_sum,
        lambda array: tensor_sum(torch.from_numpy(array)),
        lambda array: weighted_sum(_bytes_of(array)),
        lambda array: weighted_sum(_bytes_of(array)[1:]),
    ],
    ids=["array", "tensor", "on a device", "of odd bytes"],
)
def test_exchanged_elements_and_flipped_signs_change_every_checksum(
    sum_of: Callable[[Any], int], change: Callable[[Any], None]
) -> None:
    array = np.random.default_rng(0).standard_normal(_COUNT).astype(np.float32)
    before = sum_of(array)
    assert sum_of(array.copy()) == before
    change(array)
    assert sum_of(array) != before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_large_tensor_is_summed_up_on_its_device() -> None:
    array = np.random.default_rng(0).standard_normal(_COUNT)
    there = torch.from_numpy(array).cuda()
    assert tensor_sum(there) == weighted_sum(_bytes_of(array))

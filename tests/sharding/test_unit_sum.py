"""The sum of one unit: calls of a module within a turn, and turns that leave it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helios.errors import UsageError
from helios.sharding.sharded_gradients import UnitSum, Waves


class Alone:
    """A group of one process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def reduce(unit: UnitSum, gradient: float | None) -> torch.Tensor:
    """Reduce as FSDP does after a backward: zeros if no parameter has got a gradient."""
    chunks, output, group = torch.zeros(1, 2), torch.full((2,), 7.0), Alone()
    if gradient is not None:
        unit.record_gradient(chunks)
        chunks.fill_(gradient)
    call: Any = unit.reduce
    call(output, chunks, group)
    return output


def do_nothing() -> None:
    """Nobody compares."""


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


@pytest.mark.parametrize("gradients", [(-0.0, None), (None, -0.0), (None, -0.0, None)])
def test_zeros_of_calls_without_a_gradient_are_not_added(gradients: tuple[float | None]) -> None:
    unit = UnitSum(Waves(1, 1, 0), do_nothing)
    for _ in gradients:
        unit.count_forward()
    *_, last = [reduce(unit, gradient) for gradient in gradients]
    assert bits(last) == bits(torch.tensor([-0.0, -0.0]))


@pytest.mark.shows("P88")
def test_a_second_backward_of_a_turn_is_an_error() -> None:
    unit = UnitSum(Waves(2, 1, 0), do_nothing)
    unit.count_forward()
    reduce(unit, 1.0)
    unit.count_forward()
    with pytest.raises(UsageError, match="must have one backward"):
        reduce(unit, 2.0)

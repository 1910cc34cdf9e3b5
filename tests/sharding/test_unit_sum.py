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


def test_gradients_of_several_calls_are_added_in_their_order() -> None:
    unit = UnitSum(Waves(1, 1, 0), do_nothing)
    for _ in range(3):
        unit.count_forward()
    *_, last = [reduce(unit, gradient) for gradient in (1e8, 1.0, -1e8)]
    assert last.tolist() == [0.0, 0.0]


def test_forward_passes_without_gradients_are_not_counted() -> None:
    unit = UnitSum(Waves(1, 1, 0), do_nothing)
    with torch.no_grad():
        unit.count_forward()
    unit.count_forward()
    assert reduce(unit, 3.0).tolist() == [3.0, 3.0]


def test_forward_passes_that_are_computed_again_are_not_counted() -> None:
    unit = UnitSum(Waves(1, 1, 0), do_nothing)
    unit.count_forward()
    result = torch.ones(1, requires_grad=True) * 2
    result.register_hook(torch.enable_grad()(lambda _: unit.count_forward()))
    result.backward()
    assert reduce(unit, 3.0).tolist() == [3.0, 3.0]


def test_a_sum_without_a_last_backward_is_made_at_the_end_of_the_turn() -> None:
    unit = UnitSum(Waves(1, 1, 0), do_nothing)
    for gradient in (3.0, -0.0, None):
        for _ in range(3):
            unit.count_forward()
        # FSDP adds the second output to the first one.
        outputs = [reduce(unit, gradient), reduce(unit, None)]
        assert bits(outputs[0] + outputs[1]) == bits(torch.tensor([-0.0, -0.0]))
        unit.add_late()
        expected = 0.0 if gradient is None else gradient
        assert bits(outputs[0] + outputs[1]) == bits(torch.tensor([expected, expected]))
        unit.finish_turn("net")
    unit.count_forward()
    assert reduce(unit, 4.0).tolist() == [4.0, 4.0]
    unit.add_late()
    unit.finish_turn("net")


@pytest.mark.shows("P88")
def test_a_second_backward_of_a_turn_is_an_error() -> None:
    unit = UnitSum(Waves(2, 1, 0), do_nothing)
    unit.count_forward()
    reduce(unit, 1.0)
    unit.count_forward()
    with pytest.raises(UsageError, match="must have one backward"):
        reduce(unit, 2.0)


def test_a_unit_takes_part_in_all_turns_or_in_none() -> None:
    waves = Waves(2, 1, 0)
    unit = UnitSum(waves, do_nothing)
    unit.finish_turn("net.head")
    waves.turn = 1
    unit.finish_turn("net.head")
    waves.turn = 0
    unit.count_forward()
    reduce(unit, 1.0)
    unit.finish_turn("net.head")
    waves.turn = 1
    with pytest.raises(UsageError, match=r"'net\.head'.* took part in 1 of 2 turns"):
        unit.finish_turn("net.head")

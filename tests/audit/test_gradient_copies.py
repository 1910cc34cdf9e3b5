"""Gradients are compared on bytes."""

from __future__ import annotations

import math

import pytest
import torch

from helios.audit.gradient_copies import GradientCopy, GradientMismatch


def copy_of(**gradients: torch.Tensor | None) -> GradientCopy:
    parameters = {}
    for name, gradient in gradients.items():
        parameter = torch.zeros(2, 3)
        parameter.grad = gradient
        parameters[name] = parameter
    return GradientCopy.take(parameters)


def sent(copy: GradientCopy) -> GradientCopy:
    return GradientCopy.read(copy.forms(), copy.content())


def test_equal_bytes_are_equal_also_in_another_process() -> None:
    gradient = torch.tensor([[math.nan, -0.0, math.inf], [1.0, 2.0, 1e-45]])
    first = copy_of(a=gradient, b=None, c=gradient.t().contiguous().t())
    assert first.difference(copy_of(a=gradient, b=None, c=gradient)) is None
    assert sent(first).difference(first) is None
    assert sent(first).digest() == first.digest()


@pytest.mark.shows("P15")
@pytest.mark.parametrize(
    ("other", "values"),
    [
        (-0.0, ("0.0 (0x00000000)", "-0.0 (0x80000000)")),
        (1e-45, ("0.0 (0x00000000)", "1.401298464324817e-45 (0x00000001)")),
        (math.nan, ("0.0 (0x00000000)", "nan (0x7fc00000)")),
    ],
)
def test_any_other_bit_is_a_difference(other: float, values: tuple[str, str]) -> None:
    gradient = torch.zeros(2, 3)
    changed = gradient.clone()
    changed[1, 2] = other
    first, second = copy_of(a=gradient, b=gradient), copy_of(a=gradient, b=changed)
    assert first.difference(second) == GradientMismatch("b", (1, 2), values, 1, 1)
    assert sent(first).difference(second) == first.difference(second)
    assert first.digest() != second.digest()


def test_a_gradient_that_is_missing_once_is_a_difference() -> None:
    gradient = torch.ones(2, 3)
    found = copy_of(a=gradient, b=gradient).difference(copy_of(a=None, b=gradient * 2))
    form = "torch.float32 of shape (2, 3)"
    assert found == GradientMismatch("a", None, (form, "no gradient"), 0, 2)


def test_a_copy_does_not_follow_the_gradient() -> None:
    gradient = torch.ones(2, 3)
    first = copy_of(a=gradient)
    gradient.add_(1)
    assert first.difference(copy_of(a=gradient)) is not None


def test_sparse_and_complex_gradients_are_compared_too() -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 3, 1])).sum().backward()
    first = GradientCopy.take({"weight": layer.weight})
    assert sent(first).difference(first) is None
    layer(torch.tensor([1])).sum().backward()
    assert GradientCopy.take({"weight": layer.weight}).difference(first) is not None
    number = torch.zeros((), dtype=torch.complex64, requires_grad=True)
    (number * 1j).abs().backward()
    assert GradientCopy.take({"n": number}).difference(GradientCopy.take({"n": number})) is None

"""Gradients in flat buffers: what is moved in comes out, and buffers are used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helios.errors import UsageError
from helios.replicas.flat_gradients import FlatBuffer, FlatGradients
from helios.replicas.reduction_tree import TreeStack
from helios.replicas.tree_reducer import TreeReducer


class Parts(nn.Module):
    """Parameters of several types, shapes and layouts; which of them are used is told."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4, generator=generator))
        self.images.data = self.images.data.to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.wide = nn.Parameter(torch.randn(2, generator=generator).double())

    def loss(self, factor: float, *names: str) -> Tensor:
        parts = [getattr(self, name) for name in names or dict(self.named_parameters())]
        return torch.stack([(part.double() ** 2 * factor).sum() for part in parts]).sum()


def backward(model: Parts, factor: float, *names: str) -> dict[str, Tensor]:
    """Do a backward; return copies of the gradients, which stay in ``.grad``."""
    model.loss(factor, *names).backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def reduce_and_show(flat: FlatGradients, *leaves: FlatBuffer) -> None:
    """Add the leaves of one process along the tree, and show the sum."""
    stack = TreeStack(range(len(leaves)), len(leaves), flat.add)
    for leaf in leaves:
        stack.push(leaf)
    flat.set_gradients(flat.reduce(stack.take(), TreeReducer(len(leaves))))


@pytest.mark.shows("S58")
def test_gradients_take_the_form_that_parameters_get_between_two_steps() -> None:
    model = Parts()
    flat = FlatGradients(model.named_parameters())
    backward(model, 0.5)
    reduce_and_show(flat, flat.move_all())
    model.zero_grad()
    model.double()
    model.images.data = model.images.data.contiguous()
    model.empty.data = torch.ones(2, 4).double()
    expected = backward(model, 1.5)
    reduce_and_show(flat, flat.move_all())
    assert_same(gradients_of(model), expected)
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


def test_frozen_parameters_take_no_room_and_may_be_thawed_between_steps() -> None:
    model = Parts()
    model.images.requires_grad_(False)
    flat = FlatGradients(model.named_parameters())
    backward(model, 1.0)
    leaf = flat.move_all()
    small = leaf.flats[0].numel()
    assert small < model.images.numel()
    reduce_and_show(flat, leaf)
    assert model.images.grad is None
    model.zero_grad()
    model.images.requires_grad_(True)
    expected = backward(model, 2.0)
    leaf = flat.move_all()
    assert leaf.flats[0].numel() >= small + model.images.numel()
    reduce_and_show(flat, leaf)
    assert_same(gradients_of(model), expected)
    assert "images" in expected


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    flat = FlatGradients(model.named_parameters())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match=r"'0.weight' must be dense .* num_replicas=1"):
        flat.move_all()

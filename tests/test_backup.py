"""A backup restores attributes, containers, tensors and generators, all in place."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helios.backup import Backup


class Slotted:
    __slots__ = ("count", "gone", "late")

    def __init__(self) -> None:
        self.count, self.gone = 0, 1


class Holder:
    """Any object with attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.slotted = Slotted()

    def method(self) -> Any:
        """Return what it holds."""
        return self.value


def _draw_torch(generator: torch.Generator) -> None:
    torch.rand(1, generator=generator)


def _move(value: dict[str, int]) -> None:
    value["a"] = value.pop("a")


_VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]] = {
    "list": (lambda: [1, 2], lambda value: value.append(3), list),
    "dict": (lambda: OrderedDict(a=1, b=2), _move, lambda value: [*value.items()]),
    "set": (lambda: {1, 2}, lambda value: value.add(3), set),
    "deque": (lambda: deque([1], maxlen=2), lambda value: value.extend((2, 3)), list),
    "array": (lambda: np.arange(3.0), lambda value: value.__iadd__(1), np.ndarray.tolist),
    "random": (lambda: random.Random(1), random.Random.random, random.Random.getstate),
    "numpy": (
        lambda: np.random.default_rng(1),
        np.random.Generator.random,
        lambda value: str(value.bit_generator.state),
    ),
    "torch": (
        lambda: torch.Generator().manual_seed(1),
        _draw_torch,
        lambda value: value.get_state().tolist(),
    ),
}


@pytest.mark.parametrize("case", _VALUES)
def test_what_is_changed_in_place_comes_back_wherever_it_lies(case: str) -> None:
    make, change, show = _VALUES[case]
    value = make()
    holder = Holder([{"deep": (value,)}])
    owner = Holder([partial(print, holder.method)])
    before = show(value)
    backup = Backup([owner])
    for _ in range(2):
        change(value)
        holder.value, holder.late = value, holder
        holder.slotted.count, holder.slotted.late = 1, 2
        del holder.slotted.gone
        assert show(value) != before
        backup.restore()
        assert show(value) == before
        assert holder.value[0]["deep"][0] is value
        assert [*vars(holder)] == ["value", "slotted"]
        assert (holder.slotted.count, holder.slotted.gone) == (0, 1)
        assert not hasattr(holder.slotted, "late")


@pytest.mark.shows("C17")
@pytest.mark.parametrize("on_host", [False, True])
def test_networks_come_back_in_place(on_host: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net.register_buffer("seen", torch.zeros(2), persistent=False)
    weights = {name: part.clone() for name, part in net.state_dict().items()}
    objects = dict(net.named_parameters())
    backup = Backup([net], on_host=on_host)
    with torch.no_grad():
        for part in (*net.parameters(), *net.buffers()):
            part.add_(1)
        net[0].weight.data = torch.zeros(7)
        net[0].bias.requires_grad_(False)
        net[0].bias.grad = torch.ones(3)
    net[1].running_mean = torch.ones(3)
    net.register_buffer("late", torch.ones(1))
    net.register_forward_hook(lambda *args: None)
    net.eval()
    backup.restore()
    assert dict(net.named_parameters()) == objects
    assert all(part.equal(weights[name]) for name, part in net.state_dict().items())
    assert net.seen.equal(torch.zeros(2))
    assert "late" not in dict(net.named_buffers())
    assert net[0].bias.requires_grad
    assert net[0].bias.grad is None
    assert net[1].training
    assert not net._forward_hooks


def test_views_share_their_memory_afterwards() -> None:
    whole = torch.arange(6.0)
    values = [whole[2:4], torch.ones(1).expand(4), whole.int()]
    part, wide, integers = values
    backup = Backup([values])
    part.zero_()
    wide.untyped_storage().fill_(0)
    integers += 1
    values.clear()
    backup.restore()
    assert values[0] is part
    assert whole.equal(torch.arange(6.0))
    assert wide.equal(torch.ones(4))
    assert integers.equal(torch.arange(6, dtype=torch.int32))
    part[0] = 9
    assert whole[2] == 9

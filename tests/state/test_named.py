"""Hooks and class attributes that training changes are named: no checkpoint can hold them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.state.owners import Owner, network, started


def _silent(*args: Any) -> None:
    return None


def _owner() -> Any:
    net = network()
    return Owner(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5))


@pytest.mark.shows("S62")
def test_hooks_that_are_registered_after_the_start_are_named(said: list[str]) -> None:
    owner = _owner()
    owner.net[0].register_forward_hook(_silent)
    discovery = started(owner)
    owner.net[1].register_forward_hook(_silent)
    discovery.begin_training()
    assert discovery.capture()["missing"] == {}
    owner.net[0].register_full_backward_hook(_silent)
    owner.net[3].weight.register_hook(_silent)
    owner.net[3].bias.register_post_accumulate_grad_hook(_silent)
    owner.optimizer.register_step_post_hook(_silent)
    assert sorted(discovery.capture()["missing"]) == [
        "net.0 (backward hook)",
        "net.3.bias (post accumulate grad hook)",
        "net.3.weight (backward hook)",
        "optimizer (optimizer step post hook)",
    ]
    assert len(said) == 1
    assert "register it in setup(), or at each start" in said[0]


class Counting(nn.Linear):
    calls: ClassVar[int] = 0
    shapes: ClassVar[list[int]] = []
    rng: ClassVar[random.Random] = random.Random(1)
    limit: ClassVar[int] = 3

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        self.shapes.append(len(x) + int(self.rng.random()))
        return super().forward(x)


class WithHistory:
    history: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.net = Counting(1, 1)


@pytest.mark.shows("S63")
def test_class_attributes_that_training_changes_are_named(said: list[str]) -> None:
    owner = WithHistory()
    discovery = started(owner)
    assert discovery.capture()["missing"] == {}
    owner.net(torch.ones(1, 1))
    owner.history.append(1.0)
    assert sorted(discovery.capture()["missing"]) == [
        "class Counting.calls",
        "class Counting.rng",
        "class Counting.shapes",
        "class WithHistory.history",
    ]
    assert "make it an attribute of the instance" in said[0]

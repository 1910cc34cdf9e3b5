"""Every change of a module of a network is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.state_graph.owners import Owner, bits, started


class Part(nn.Module):
    """A module of atoms, a tuple of them, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.sizes, self.rest = 0, (1, 2), None
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))


class Other(Part):
    """The same in another class."""


class Listing(Part):
    """The same with something that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [1]


def _made() -> Owner:
    net = nn.Sequential(Part(), Part(), Listing(), nn.Sequential(Part(), Part()))
    return Owner(net=net)


def _hook(*args: Any) -> None:
    return None


def _rename(net: Any) -> None:
    del net[0].count
    net[0].number = 0


def _take_class(net: Any) -> None:
    net[0].__class__ = Other
    net[2].items.append(net[0])


def _state_of_its_own(net: Any) -> None:
    net[0].state_dict = lambda *args, **options: {}


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda net: setattr(net[0], "count", 1),
    "an attribute of another type": lambda net: setattr(net[0], "count", False),
    "a tuple": lambda net: setattr(net[0], "sizes", (1, 3)),
    "a list instead of None": lambda net: setattr(net[0], "rest", []),
    "None instead of a list": lambda net: setattr(net[2], "items", None),
    "a list in place": lambda net: net[2].items.append(2),
    "a new attribute": lambda net: setattr(net[0], "note", "new"),
    "a deleted attribute": lambda net: delattr(net[0], "count"),
    "a renamed attribute": _rename,
    "an attribute of a parameter": lambda net: setattr(net[0].weight, "scale", 2.0),
    "a hook": lambda net: net[0].register_forward_hook(_hook),
    "a hook of its state": lambda net: net[0].register_state_dict_post_hook(_hook),
    "a state of its own": _state_of_its_own,
    "a class": _take_class,
    "a new buffer": lambda net: net[0].register_buffer("late", torch.ones(1)),
    "a new buffer that is not saved": lambda net: net[0].register_buffer(
        "late", torch.ones(1), persistent=False
    ),
    "a replaced buffer": lambda net: net[0].register_buffer("seen", torch.zeros(3)),
    "a new parameter": lambda net: setattr(net[0], "late", nn.Parameter(torch.ones(1))),
    "a replaced parameter": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(3))),
    "a tied parameter": lambda net: setattr(net[0], "weight", net[1].weight),
    "shared memory": lambda net: setattr(net[0].weight, "data", net[1].weight.data),
    "an exchanged submodule": lambda net: setattr(net[3], "0", net[3][1]),
    "a new submodule": lambda net: net[3].append(nn.ReLU()),
    "a submodule of another class": lambda net: setattr(net[3], "1", nn.ReLU()),
    "a module that is frozen": lambda net: net[0].requires_grad_(requires_grad=False),
    "a module in evaluation mode": lambda net: net[0].eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_module_is_seen(name: str, said: list[str]) -> None:
    owner = _made()
    discovery = started(owner)
    before = bits(discovery.capture())
    CHANGES[name](owner.net)
    assert bits(discovery.capture()) != before


def test_what_a_second_start_restores_in_a_module_is_saved_again() -> None:
    owner = _made()
    discovery = started(owner)
    discovery.begin_training()
    owner.net[0].sizes = (3, 4)
    del owner.net[1].count
    state = discovery.capture()
    # This setup finds what the first training has left.
    again = started(owner)
    again.restore(state)
    assert bits(again.capture()["values"]) == bits(state["values"])
    owner.net[0].sizes = None
    nodes = again.capture()["values"]["nodes"]
    assert nodes["net.0"]["set"] == {"sizes": None}
    assert nodes["net.1"]["deleted"] == ["count"]

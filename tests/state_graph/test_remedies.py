"""What a checkpoint lacks is named with the remedy that fits it, and where it lies."""

from __future__ import annotations

import collections
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helios.errors import StateError
from tests.state_graph.owners import Owner, started


class Opaque(bytearray):
    """An object without a state."""

    def __init__(self) -> None:
        self.count = 0


class Counting:
    """A class whose attribute training changes."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class Point(collections.namedtuple("Point", "x y")):
    """A subclass of a plain type."""


def _double(value: float) -> float:
    return 2 * value


def _hook(*_: Any) -> None:
    """Do nothing."""


def _register(owner: Any) -> None:
    owner.net.register_forward_hook(_hook)


def _count(owner: Any) -> None:
    type(owner.counting).count += 1


@pytest.mark.shows("S72")
@pytest.mark.parametrize(
    ("change", "place", "remedy"),
    [
        (_register, "net (forward hook)", "register it in setup(), or at each start"),
        (_count, "class Counting.count", "make it an attribute of the instance"),
        (lambda o: setattr(o, "value", iter([1])), "value", "create the iterator in setup()"),
        (lambda o: setattr(o, "value", _double), "value", "keep the name of the chosen object"),
        (lambda o: setattr(o, "value", Counting), "value", "keep the name of the chosen object"),
        (
            lambda o: setattr(o, "value", functools.partial(_double, 1)),
            "value",
            "keep the name of the chosen object",
        ),
        (lambda o: setattr(o, "value", Opaque()), "value", "give it state_dict()"),
        (lambda o: setattr(o, "value", Point(1, 2)), "value", "give it state_dict()"),
    ],
)
def test_a_reason_has_the_remedy_that_fits(
    change: Callable[[Any], None], place: str, remedy: str, said: list[str]
) -> None:
    owner = Owner(net=nn.Linear(1, 1), counting=Counting(), rngs=[], pool=deque(), value=None)
    discovery = started(owner)
    discovery.begin_training()
    change(owner)
    (reason,) = (text for name, text in discovery.capture()["missing"].items() if name == place)
    assert remedy in reason
    (text,) = said
    assert remedy in text
    assert "state_dict()" in reason or "state_dict()" not in text


@pytest.mark.shows("S72")
@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([1, Opaque()], f"value.1: {__name__}.Opaque has"),
        ({"a": [1, (2, Opaque())]}, f"value.a.1.1: {__name__}.Opaque has"),
        ([threading.Lock()], "value.0: "),
        ({"steps": iter([1, 2])}, "value.steps: an iterator"),
        (Opaque(), f"{__name__}.Opaque has"),
    ],
)
def test_an_element_of_a_container_is_named_where_it_is_at_fault(value: Any, where: str) -> None:
    owner = Owner(value=None)
    discovery = started(owner)
    owner.value = value
    (reason,) = discovery.capture()["missing"].values()
    assert reason.startswith(where)


@pytest.mark.shows("S72")
def test_what_the_load_has_named_is_not_named_again(said: list[str]) -> None:
    owner = Owner(first=None, second=None)
    discovery = started(owner)
    discovery.note_named(["first"])
    owner.first, owner.second = Opaque(), Opaque()
    assert sorted(discovery.capture()["missing"]) == ["first", "second"]
    (text,) = said
    assert "second" in text
    assert "first" not in text


@pytest.mark.shows("S72")
def test_a_parameter_that_only_an_optimizer_holds_is_named_as_it_is_written(
    said: list[str],
) -> None:
    net = nn.Linear(2, 2)
    owner = Owner(net=net, opt=torch.optim.SGD(net.parameters(), lr=0.1))
    discovery = started(owner)
    owner.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = discovery.capture()
    assert list(state["misfits"]) == ["opt"]
    assert said[0].count('opt.param_groups[1]["params"][0]') == 1
    assert "opt.1.0" not in said[0]
    with pytest.raises(StateError, match=r'missing now: opt.param_groups\[1\]\["params"\]\[0\]'):
        started(Owner(net=net, opt=torch.optim.SGD(net.parameters(), lr=0.1))).restore(state)

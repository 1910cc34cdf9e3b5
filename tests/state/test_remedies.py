"""What a checkpoint lacks is named with the remedy that fits it, and where it lies."""

from __future__ import annotations

import collections
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.state.owners import Owner, started


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
        (lambda o: setattr(o, "value", Point(1, 2)), "value", "types_for_safe_load()"),
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

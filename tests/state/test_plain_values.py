"""Which values are plain, and what their digests tell apart."""

from __future__ import annotations

import functools
from collections import defaultdict
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helios.state.digests import Identities, mark_of
from tests.state.owners import Owner, changed, started


class Colour(Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Thing:
    def __init__(self, content: Any = None) -> None:
        self.content = content


_IDENTITIES = Identities()


def _digest(value: Any) -> bytes:
    return mark_of(value, _IDENTITIES)


def _saved(value: Any, *safe_types: type) -> dict[str, Any]:
    """Return the state of an owner to which training gave a value."""
    owner = Owner(value=None)
    discovery = started(owner)
    discovery.safe_types = safe_types
    owner.value = value
    return discovery.capture()


class Opaque(bytearray):
    """An object without a state."""

    def __init__(self) -> None:
        self.count = 0


_OBJECT = "keep the name of the chosen object"


@pytest.mark.shows("S72")
@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (Thing(), "types_for_safe_load()"),
        (Point(1), "types_for_safe_load()"),
        (Opaque(), "give it state_dict()"),
        (defaultdict(lambda: 0), ""),
        (torch.zeros(2, requires_grad=True) * 2, "detach()"),
        (torch.zeros(2).to_sparse(), ""),
        (torch.zeros(2, device="meta"), ""),
        (iter([1]), "create the iterator in setup()"),
        (_digest, _OBJECT),
        (Thing, _OBJECT),
        (functools.partial(_digest, 1), _OBJECT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_checkpoint_could_not_give_back_is_named_with_its_remedy(
    value: Any, remedy: str
) -> None:
    state = _saved(value)
    assert remedy in {**state["missing"], **state["misfits"]}["value"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.float32(1), np.float64(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (Colour.RED, 1),
    ],
)
def test_values_of_other_type_order_or_bytes_have_another_digest(one: Any, other: Any) -> None:
    assert _digest(one) != _digest(other)


@pytest.mark.parametrize("make", [lambda: np.zeros(300_000), lambda: list(range(300, 600_000))])
def test_a_large_value_is_read_to_its_end(make: Any) -> None:
    owner = Owner(value=make())
    discovery = started(owner)
    owner.value = make()
    assert not changed(discovery)
    owner.value[-1] = 1
    assert changed(discovery)

"""The choice of a device, and the way of a batch to it.

Batches go to the meta device here, where movement shows on any machine.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import pytest
import torch

from helios.engines.device import move_to_device, select_gpus
from helios.errors import ArgumentError

META = torch.device("meta")


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.shows("H46")
@pytest.mark.parametrize(
    ("count", "use_cpu", "gpus"),
    [
        (2, True, [0]),
        (0, None, [0]),
        (2, None, [2]),
        (2, None, [0, 0]),
        (2, None, 0),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error_that_shows_them(
    monkeypatch: pytest.MonkeyPatch, count: int, use_cpu: bool | None, gpus: Any
) -> None:
    """A ValueError; without CUDA, gpus=[0] must not mean the CPU."""
    set_gpus(monkeypatch, count)
    form = rf"^Trainer\(gpus=\.\.\.\) must .+, got {re.escape(repr(gpus))}\. \w.+"
    with pytest.raises(ArgumentError, match=form):
        select_gpus(use_cpu, gpus)


class Pair(NamedTuple):
    image: Any
    label: Any


class NamedBatch(dict[str, Any]):
    """A dict of the user's own."""


@dataclasses.dataclass
class Plain:
    image: Any
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    name: str = "frozen"


def ones() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.shows("H61", "R37", "E7")
@pytest.mark.parametrize(
    ("batch", "get"),
    [
        (ones(), lambda b: b),
        (NamedBatch(a=ones()), lambda b: b["a"]),
        (Pair(ones(), 3), lambda b: b.image),
        (Frozen(ones()), lambda b: b.image),
        ({"a": [Pair((ones(), "x"), None)]}, lambda b: b["a"][0].image[0]),
        ([Frozen({"deep": (Plain(ones()),)})], lambda b: b[0].image["deep"][0].image),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_move_out_of_any_container_which_keeps_its_type(batch: Any, get: Any) -> None:
    """Nested tensors, dicts, lists, tuples, named tuples, dataclasses."""
    moved = move_to_device(batch, META)
    assert get(moved).device == META
    assert get(moved).shape == (2,)
    assert get(batch).device == torch.device("cpu")
    if not isinstance(batch, torch.Tensor):
        assert type(moved) is type(batch)

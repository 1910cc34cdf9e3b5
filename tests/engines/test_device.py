"""The choice of a device, and the way of a batch to it.

Batches go to the meta device here, where movement shows on any machine.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from helios.engines.device import as_current, move_to_device, select_gpus
from helios.errors import ArgumentError, UsageError

META = torch.device("meta")


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.shows("H46")
@pytest.mark.parametrize(
    ("count", "use_cpu", "gpus", "selected"),
    [
        (0, None, None, []),
        (0, True, None, []),
        (2, True, None, []),
        (2, None, None, [0, 1]),
        (2, False, None, [0, 1]),
        (4, None, [3, 1], [3, 1]),
        (4, False, [2], [2]),
        (1, None, [0], [0]),
    ],
)
def test_the_arguments_and_the_machine_decide_which_gpus_are_used(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    use_cpu: bool | None,
    gpus: list[int] | None,
    selected: list[int],
) -> None:
    """H46, H47."""
    set_gpus(monkeypatch, count)
    assert select_gpus(use_cpu, gpus) == selected


@pytest.mark.parametrize(
    ("device", "has_begun", "entered"),
    [
        ("cuda:1", False, ["cuda:1"]),
        ("cuda:1", True, ["cuda:1"]),
        ("cuda:0", True, ["cuda:0"]),
        ("cuda:0", False, []),
        ("cuda", True, []),
        ("cpu", False, []),
        ("meta", False, []),
    ],
)
def test_the_gpu_of_a_run_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, has_begun: bool, entered: list[str]
) -> None:
    """What names no number, as the events of the ledger, would else be of the first GPU."""
    seen: list[str] = []

    @contextlib.contextmanager
    def make_current(chosen: torch.device) -> Iterator[None]:
        seen.append(str(chosen))
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_begun)
    with as_current(torch.device(device)):
        assert seen == entered
    assert seen == [*entered, *(["end"] if entered else [])]


def test_the_list_of_the_user_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, 2)
    gpus = [1]
    assert select_gpus(None, gpus) is not gpus


@pytest.mark.shows("H46")
@pytest.mark.parametrize(
    ("count", "use_cpu", "gpus"),
    [
        (2, True, [0]),
        (2, True, []),
        (0, None, [0]),
        (2, None, [2]),
        (2, None, [-1]),
        (2, None, [0, 1, 2]),
        (2, None, []),
        (2, None, [0, 0]),
        (2, None, [True]),
        (2, None, ["0"]),
        (2, None, (0,)),
        (2, None, 0),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error_that_shows_them(
    monkeypatch: pytest.MonkeyPatch, count: int, use_cpu: bool | None, gpus: Any
) -> None:
    """H46, H47, API section 12: a ValueError; without CUDA, gpus=[0] must not mean the CPU."""
    set_gpus(monkeypatch, count)
    form = rf"^Trainer\(gpus=\.\.\.\) must .+, got {re.escape(repr(gpus))}\. \w.+"
    with pytest.raises(ArgumentError, match=form):
        select_gpus(use_cpu, gpus)


def test_a_gpu_that_is_demanded_where_there_is_none_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H46: a RuntimeError."""
    set_gpus(monkeypatch, 0)
    form = r"use_cpu=False\) must find a GPU.*not available\. Omit use_cpu"
    with pytest.raises(UsageError, match=form):
        select_gpus(use_cpu=False, gpus=None)


class Pair(NamedTuple):
    image: Any
    label: Any


class NamedBatch(dict[str, Any]):
    """A dict of the user's own."""


class Boxes(list[Any]):
    """A list of the user's own, with something beside its members."""

    size = (0, 0)


@dataclasses.dataclass
class Plain:
    image: Any
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    name: str = "frozen"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    image: Any
    name: str


@dataclasses.dataclass
class Derived:
    image: Any
    length: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.length = 7


def ones() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.shows("H61", "R37", "E7")
@pytest.mark.parametrize(
    ("batch", "get"),
    [
        (ones(), lambda b: b),
        ([ones(), 1], lambda b: b[0]),
        ((1, ones()), lambda b: b[1]),
        ({"a": ones(), "b": "text"}, lambda b: b["a"]),
        (NamedBatch(a=ones()), lambda b: b["a"]),
        (collections.OrderedDict(a=ones(), b=2), lambda b: b["a"]),
        (collections.defaultdict(list, a=ones()), lambda b: b["a"]),
        (Pair(ones(), 3), lambda b: b.image),
        (Boxes([ones()]), lambda b: b[0]),
        (Plain(ones()), lambda b: b.image),
        (Frozen(ones()), lambda b: b.image),
        (Slotted(ones(), "slotted"), lambda b: b.image),
        (Derived(ones()), lambda b: b.image),
        ({"a": [Pair((ones(), "x"), None)]}, lambda b: b["a"][0].image[0]),
        ([Frozen({"deep": (Plain(ones()),)})], lambda b: b[0].image["deep"][0].image),
        (torch.nn.Parameter(ones()), lambda b: b),
        (pack_sequence([ones()]), lambda b: b.data),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_move_out_of_any_container_which_keeps_its_type(batch: Any, get: Any) -> None:
    """E7: nested tensors, dicts, lists, tuples, named tuples, dataclasses."""
    moved = move_to_device(batch, META)
    assert get(moved).device == META
    assert get(moved).shape == (2,)
    assert get(batch).device == torch.device("cpu")
    if not isinstance(batch, torch.Tensor):
        assert type(moved) is type(batch)


class Opaque:
    def __init__(self) -> None:
        self.tensor = ones()


@pytest.mark.parametrize(
    "value",
    ["text", b"bytes", 3, 2.5, True, None, np.ones(2), Opaque(), {1, 2}, range(3), Plain, Pair],
)
def test_values_that_are_no_tensors_stay_as_they_are(value: Any) -> None:
    """E7; a class is not one of its instances."""
    assert move_to_device(value, META) is value
    assert move_to_device([value], META)[0] is value
    assert move_to_device(Plain(value), META).image is value


def test_what_lies_beside_the_members_of_a_container_goes_along() -> None:
    factory = collections.defaultdict(lambda: 5, a=ones())
    assert move_to_device(factory, META)["unknown"] == 5
    ordered = collections.OrderedDict(b=ones(), a=ones())
    assert list(move_to_device(ordered, META)) == ["b", "a"]
    boxes = Boxes([ones()])
    boxes.size = (4, 3)
    assert move_to_device(boxes, META).size == (4, 3)
    assert move_to_device(Derived(ones()), META).length == 7
    assert move_to_device(Slotted(ones(), "kept"), META).name == "kept"
    assert move_to_device(torch.Size([2, 3]), META) == torch.Size([2, 3])
    assert type(move_to_device(torch.Size([2, 3]), META)) is torch.Size


@pytest.mark.shows("E7")
def test_the_batch_that_was_given_is_not_changed() -> None:
    """E7: copy, do not mutate; also where the device is the same."""
    tensor = ones()
    inner = [tensor]
    frozen, plain = Frozen(tensor), Plain(inner)
    batch = {"list": inner, "frozen": frozen, "plain": plain}
    for device in (META, torch.device("cpu")):
        moved = move_to_device(batch, device)
        assert moved is not batch
        assert moved["list"] is not inner
        assert moved["plain"] is not plain
        moved["list"].append(0)
    assert batch == {"list": inner, "frozen": frozen, "plain": plain}
    assert inner == [tensor]
    assert plain.image is inner
    assert frozen.image is tensor


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = ones()
    assert move_to_device([tensor], torch.device("cpu"))[0] is tensor


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = move_to_device({"a": packed}, torch.device("cpu"))["a"]
    assert isinstance(moved, PackedSequence)
    assert torch.equal(moved.data, packed.data)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)

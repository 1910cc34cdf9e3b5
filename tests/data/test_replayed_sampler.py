"""A sampler without a state: its generators are saved, and what else it changes is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from helios.data.order import Position, ReplayedOrder, find_generators
from helios.data.samplers import ResumableSampler


class Around(Sampler[int]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@pytest.mark.shows("S66")
def test_generators_are_found_in_samplers_inside_samplers() -> None:
    inner, outer = torch.Generator(), random.Random(1)
    stock = BatchSampler(RandomSampler(range(4), generator=inner), 2, drop_last=False)
    around = Around(batches=stock, shuffler=outer, name="around")
    assert find_generators(around) == {"batches.sampler.generator": inner, "shuffler": outer}
    assert find_generators(RandomSampler(range(4))) == {}
    assert find_generators([[0, 1]]) == {}


class Counting(ResumableSampler):
    """Begins each pass at another sample."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.order = [0, 1, 2, 3]

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from self.order[self.passes % 4 :]


class InPlace(Counting):
    """Shuffles its list further in each pass."""

    def __iter__(self) -> Iterator[int]:
        first = int(torch.randint(1, 4, ()))
        self.order[0], self.order[first] = self.order[first], self.order[0]
        yield from self.order


class Declared(Counting):
    """Declares that its order does not depend on what it counts."""

    unsaved = ("passes",)


class WithState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.passes = state_dict["passes"]


class ByEpoch(Counting):
    """Computes its order from the epoch, which is set before each pass."""

    def __iter__(self) -> Iterator[int]:
        yield from self.order[self.epoch % 4 :]


def _read(order: ReplayedOrder, passes: int) -> None:
    for epoch in range(passes):
        list(order.blocks(Position(epoch=epoch)))


@pytest.mark.shows("P114")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(Counting, "passes"), (InPlace, "order")],
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_what_a_sampler_changes_about_itself_is_named_once(
    kind: type[Counting], name: str, is_inner: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = kind()
    order = (
        ReplayedOrder(BatchSampler(sampler, 2, drop_last=False), yields_batches=True)
        if is_inner
        else ReplayedOrder(sampler)
    )
    _read(order, 1)
    assert caplog.text == ""
    _read(order, 4)
    (said,) = caplog.messages
    assert said.startswith(f"{kind.__name__} changes {name} while it is iterated over")
    assert f'unsaved = ("{name}",)' in said


@pytest.mark.shows("P114")
@pytest.mark.parametrize("kind", [Declared, WithState, ByEpoch])
def test_what_is_saved_set_or_declared_is_not_named(
    kind: type[Counting], caplog: pytest.LogCaptureFixture
) -> None:
    _read(ReplayedOrder(kind()), 4)
    assert caplog.text == ""

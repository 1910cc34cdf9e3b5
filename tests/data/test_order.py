"""Orders of users: drawn on a stream of their own, advanced by indices, restored by state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.samplers import ResumableRandomSampler, ResumableSampler
from helios.data.source import Source
from helios.errors import StateError
from tests.data.datasets import FETCH, Indices, Lone, as_lists, join, walk

LENGTH = 3_000


class Lazy(ResumableSampler):
    """Draws each index when it is asked for, from two generators."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield (int(torch.randint(self.length, ())) + random.randrange(7)) % self.length

    def __len__(self) -> int:
        return self.length


class Remembering(ResumableSampler):
    """Has a state that each pass moves: where the next pass begins."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.first = [0]
        self.length = length

    def __iter__(self) -> Iterator[int]:
        begin = self.first[0]
        for step in range(self.length):
            self.first[0] = (begin + step + int(torch.randint(2, 7, ()))) % self.length
            yield self.first[0]

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first = state_dict["first"]


class Reusing:
    """A batch sampler that fills one list again and again, without a length."""

    def __init__(self) -> None:
        self.indices = [0, 0]

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(5):
            self.indices[:] = [first, int(torch.randint(100, ()))]
            yield self.indices


def open_with(length: int = LENGTH, **options: Any) -> Source:
    loader, sampler = create_dataloader(Indices(length), **options)
    return open_source(loader, sampler, run_seed=11, purpose=FETCH)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_user_sampler_goes_on_exactly_from_any_batch(epoch: int) -> None:
    # Advanced by indices; the blocks that it is drawn in do not show.
    full = as_lists(walk(open_with(sampler=Lazy(LENGTH), batch_size=7), epoch))
    for batch in (1, 146, 147, 293, 428):
        torch.rand(batch)
        source = open_with(sampler=Lazy(LENGTH), batch_size=7)
        assert as_lists(walk(source, epoch, batch=batch, sample=batch * 7)) == full[batch:]


def test_the_batch_sampler_of_pytorch_shuffles_anew_in_each_epoch() -> None:
    data = range(40)
    for inner in (RandomSampler(data), ResumableRandomSampler(data)):
        source = open_with(40, batch_sampler=BatchSampler(inner, 4, drop_last=False))
        first, second = (as_lists(walk(source, epoch)) for epoch in (0, 1))
        assert source.num_batches() == 10
        assert first != second
        assert sorted(join(first)) == sorted(join(second)) == list(data)
        assert as_lists(walk(source, 1, batch=6, sample=24)) == second[6:]


def test_a_state_that_nobody_takes_or_that_is_missing_is_an_error() -> None:
    with_state = open_with(20, sampler=Remembering(20))
    without = open_with(20, shuffle=True)
    assert without.state_dict() == {}
    without.load_state_dict({})
    with pytest.raises(StateError, match="must load the sampler state"):
        without.load_state_dict(with_state.state_dict())
    with pytest.raises(StateError, match="must load the sampler state"):
        open_with(20, sampler=Lazy(20)).load_state_dict(with_state.state_dict())
    with pytest.raises(StateError, match="the checkpoint contains no state"):
        with_state.load_state_dict({})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_pass_that_is_cut_leaves_the_sampler_where_it_was_left(
    cut: int, num_workers: int
) -> None:
    # A hook may end an epoch: the next one must not depend on how far the sampler was drawn ahead.
    def make() -> Source:
        return open_with(sampler=Remembering(LENGTH), batch_size=7, num_workers=num_workers)

    undisturbed = make()
    walk(undisturbed, 0, limit=cut) if cut else Lone(undisturbed.batches(0)).close()
    state = undisturbed.state_dict()
    following = as_lists(walk(undisturbed, 1))
    here = open_with(sampler=Remembering(LENGTH), batch_size=7)
    walk(here, 0, limit=cut) if cut else Lone(here.batches(0)).close()
    assert as_lists(walk(here, 1)) == following
    resumed = make()
    resumed.load_state_dict(state)
    assert as_lists(walk(resumed, 1)) == following

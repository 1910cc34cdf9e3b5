"""Limited passes: the first batches of each epoch, from any place, and all else as it was."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import Source
from tests.data.datasets import FETCH, Augmented, Indices, Lone, as_lists, limited, walk
from tests.data.test_order import Remembering

LENGTH = 11


def open_with(dataset: Any = None, **options: Any) -> Source:
    loader, sampler = create_dataloader(dataset or Indices(LENGTH), **options)
    return open_source(loader, sampler, run_seed=6691, purpose=FETCH)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("limit", [1, 3, 4, 9])
def test_a_limited_pass_is_the_head_of_the_whole_one(limit: int, num_workers: int) -> None:
    how = {"batch_size": 3, "shuffle": True, "num_workers": num_workers}
    whole, source = open_with(**how), limited(open_with(**how), limit)
    for epoch in range(3):
        full = as_lists(walk(whole, epoch))[:limit]
        assert as_lists(walk(source, epoch)) == full
        for batch in range(len(full) + 1):
            rest = as_lists(walk(source, epoch, batch=batch, sample=batch * 3))
            assert rest == full[batch:]
    assert source.num_batches() == min(limit, 4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_iterator_tells_samples_and_the_last_batch(num_workers: int) -> None:
    source = limited(open_with(batch_size=4, num_workers=num_workers), 2)
    batches = Lone(source.batches(0))
    told = [(batches.num_samples, batches.is_last) for _ in batches]
    assert told == [(4, False), (4, True)]
    with pytest.raises(StopIteration):
        next(batches)
    uncut = Lone(limited(open_with(batch_size=4, num_workers=num_workers), 3).batches(0))
    assert [(uncut.num_samples, uncut.is_last) for _ in uncut] == [
        *((4, False), (4, False), (3, True))
    ]


def test_a_lowered_limit_ends_the_pass_where_it_stands() -> None:
    source = limited(open_with(batch_size=2), 2)
    assert source.num_batches(batch=4, sample=8) == 4
    assert walk(source, 0, batch=4, sample=8) == []
    assert source.num_batches(batch=1, sample=2) == 2


def test_a_raised_limit_goes_on() -> None:
    source = limited(open_with(batch_size=2), 4)
    assert as_lists(walk(source, 0, batch=2, sample=4)) == [[4, 5], [6, 7]]


def test_all_else_is_that_of_the_whole_data() -> None:
    source = open_with(sampler=Remembering(LENGTH))
    whole = source.description
    assert "limit_batches" not in whole
    assert limited(source, 2).description == {**whole, "limit_batches": 2}
    assert source.length == LENGTH
    plain = limited(open_with(batch_size=2), 2)
    assert plain.indices(0, batch=1, sample=2) == [2, 3]
    assert plain.indices(0, batch=2, sample=4) is None


def test_the_length_of_what_has_none_stays_unknown() -> None:
    source = limited(open_source(Endless(), run_seed=0, purpose=FETCH), 3)
    assert source.num_batches() is None
    for _ in range(2):
        batches = Lone(source.batches(0))
        assert [(batch, batches.is_last) for batch in batches] == [
            *((0, False), (1, False), (2, True))
        ]


class Endless:
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_worker_is_left_behind_a_limit(is_persistent: bool) -> None:
    inner = open_with(num_workers=1, persistent_workers=is_persistent)
    source = limited(inner, 2)
    assert [walk(source, epoch) for epoch in range(2)] == [[0, 1]] * 2
    assert len(multiprocessing.active_children()) == is_persistent
    source.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_but_what_was_prefetched_is_fetched_behind_a_limit(num_workers: int) -> None:
    data = Augmented(LENGTH)
    source = limited(open_with(data, num_workers=num_workers), 2)
    walk(source, 0)
    assert data.counts[:2].tolist() == [1, 1]
    assert data.counts.sum() == 2 or num_workers


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_with_state_goes_on_where_the_limit_left_it(num_workers: int) -> None:
    # How far it was drawn ahead (blocks, prefetching) must not show in the next epoch.
    length, epochs = 3_000, 4

    def make() -> Source:
        how = {"sampler": Remembering(length), "batch_size": 5, "num_workers": num_workers}
        return limited(open_with(Indices(length), **how), 3)

    undisturbed = make()
    found, states = [], []
    for epoch in range(epochs):
        found.append(as_lists(walk(undisturbed, epoch)))
        states.append(undisturbed.state_dict())
    assert found[0] != found[1]
    assert [state["epoch"] for state in states] == [1, 2, 3, 4]
    for epoch in range(1, epochs):
        resumed = make()
        resumed.load_state_dict(states[epoch - 1])
        assert as_lists(walk(resumed, epoch)) == found[epoch]
    # The other way to the next epoch: from the middle, or from the end, of the one before.
    for batch in range(4):
        resumed = make()
        resumed.load_state_dict(states[0])
        rest = as_lists(walk(resumed, 1, batch=batch, sample=batch * 5))
        assert rest == found[1][batch:]
        assert as_lists(walk(resumed, 2)) == found[2]

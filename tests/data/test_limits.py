"""Limited passes: the first batches of each epoch, from any place, and all else as it was."""

from __future__ import annotations

from typing import Any

import pytest

from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import Source
from tests.data.datasets import FETCH, Indices, as_lists, limited, walk
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

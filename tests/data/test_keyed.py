"""Keys beside indices, and what a loop of your own gets from a loader."""

from __future__ import annotations

import pytest

from helios.core import rng
from helios.data import create_dataloader
from helios.data.order import Position
from tests.data.datasets import FETCH, Augmented, Indices, collate_noisily, draw
from tests.data.shards import Run, opener


def test_the_key_depends_on_everything_that_names_a_batch() -> None:
    places = [
        Position(),
        Position(run_seed=1),
        Position(epoch=1),
        Position(purpose="fetch-validation"),
    ]
    keys = {place.fetch_keys().at(batch) for place in places for batch in (0, 1)}
    assert len(keys) == 8
    assert Position(run_seed=7, epoch=3).fetch_keys().at(2) == rng.key(7, "fetch", 3, 2, 0)


@pytest.mark.parametrize("num_replicas", range(1, 7))
def test_what_is_drawn_follows_from_epoch_batch_and_replica(num_replicas: int) -> None:
    open_one = opener(Augmented(23), batch_size=2, shuffle=True, collate_fn=collate_noisily)
    for num_processes in range(1, num_replicas + 1):
        for epoch in (0, 1):
            turns = Run(open_one, num_processes, num_replicas).walk(epoch)
            for batch, turn in enumerate(turns):
                for replica, found in enumerate(turn):
                    rng.reseed(rng.key(6691, FETCH, epoch, batch, replica))
                    expected = [draw() for _ in range(len(found))]
                    assert found[:, 1:4].tolist() == expected
                    assert found[:, 4:].tolist() == [draw()] * len(found)


def test_by_hand_a_loader_begins_where_its_sampler_says() -> None:
    loader, sampler = create_dataloader(Indices(10), 7, 3, shuffle=True)
    sampler.set_epoch(2)
    full = [batch.tolist() for batch in loader]
    assert len(loader) == len(full) == 4
    sampler.start_iter = 2
    assert [batch.tolist() for batch in loader] == full[2:]
    assert [batch.tolist() for batch in loader] == full[2:]

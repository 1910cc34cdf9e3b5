"""Passes over shared data: the same batches on any number of processes, whoever fetches them."""

from __future__ import annotations

from typing import Any

import pytest

from helios.core import rng
from tests.data.datasets import (
    FETCH,
    Augmented,
    collate_noisily,
    draw,
)
from tests.data.shards import Opener, Run, opener

LENGTH = 23


def augmented(**options: Any) -> Opener:
    how: dict[str, Any] = {"batch_size": 2, "shuffle": True, "collate_fn": collate_noisily}
    return opener(Augmented(LENGTH), **{**how, **options})


@pytest.mark.parametrize("num_replicas", range(1, 7))
def test_what_is_drawn_follows_from_epoch_batch_and_replica(num_replicas: int) -> None:
    for num_processes in range(1, num_replicas + 1):
        for epoch in (0, 1):
            turns = Run(augmented(), num_processes, num_replicas).walk(epoch)
            for batch, turn in enumerate(turns):
                for replica, found in enumerate(turn):
                    rng.reseed(rng.key(6691, FETCH, epoch, batch, replica))
                    expected = [draw() for _ in range(len(found))]
                    assert found[:, 1:4].tolist() == expected
                    assert found[:, 4:].tolist() == [draw()] * len(found)

"""Passes over shared data: the same batches on any number of processes, whoever fetches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helios.core import rng
from tests.data.datasets import (
    FETCH,
    Augmented,
    collate_noisily,
    draw,
    join,
)
from tests.data.shards import Opener, Run, Turns, opener

LENGTH = 23
_WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": True},
]


def augmented(**options: Any) -> Opener:
    how: dict[str, Any] = {"batch_size": 2, "shuffle": True, "collate_fn": collate_noisily}
    return opener(Augmented(LENGTH), **{**how, **options})


def same(found: Turns, expected: Turns) -> bool:
    """Whether all replicas have got the same bits in the same iterations."""
    pairs = zip(join(found), join(expected), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("workers", _WORKERS)
def test_workers_change_nothing(workers: dict[str, Any], pads: bool) -> None:
    here = Run(augmented(), 5, 5, pads=pads)
    full = [here.walk(epoch) for epoch in (0, 1)]
    for num_processes in (1, 3, 5):
        there = Run(augmented(**workers), num_processes, 5, pads=pads)
        assert same(there.walk(0), full[0])
        assert there.told == here.told
        there.walk(1, limit=1)
        assert same(there.walk(1, batch=1, sample=10), full[1][1:])
        there.close()

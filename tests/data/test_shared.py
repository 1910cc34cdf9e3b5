"""Passes over shared data: the same batches on any number of processes, whoever fetches them."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from helios.core import rng
from helios.data.source import LONE, NO_BATCH, Shard
from helios.errors import UsageError
from tests.data.datasets import (
    FETCH,
    Augmented,
    Indices,
    as_lists,
    collate_noisily,
    draw,
    join,
    walk_shares,
)
from tests.data.shards import Opener, Run, Turns, opener, order_of
from tests.data.test_source import Failing, TwoWays

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_a_process_without_any_batch_takes_part_in_the_evaluation(
    num_processes: int, num_workers: int
) -> None:
    for length in (1, 3):
        how = {"batch_size": 2, "num_workers": num_workers}
        run = Run(opener(range(length), **how), num_processes, 5, pads=False)
        shown = [[i] if i < length else NO_BATCH for i in range(5)]
        assert run.indices() == [shown]
        assert run.told == [(length, True)]
    run = Run(
        opener(range(13), batch_size=2, num_workers=num_workers), num_processes, 5, pads=False
    )
    assert run.indices()[1] == [[10], [11], [12], NO_BATCH, NO_BATCH]
    assert run.told == [(10, False), (3, True)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_single_samples_and_data_sets_that_fetch_batches_are_shared_too(num_workers: int) -> None:
    order = order_of(6, shuffle=True)
    how = {"shuffle": True, "num_workers": num_workers}
    single = Run(opener(range(6), batch_size=None, **how), 2, 4)
    assert single.indices() == [order[:4], order[4:] + order[:2]]
    assert single.told == [(4, False), (4, True)]
    both = Run(opener(TwoWays(6), batch_size=2, **how), 2, 3)
    (turn,) = both.walk()
    assert [batch[:, 0].tolist() for batch in turn] == [[order[r + 3], order[r]] for r in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_what_the_replicas_of_a_process_get_is_fetched(num_workers: int) -> None:
    data = Indices(24)
    source = opener(data, batch_size=2, num_workers=num_workers)(Shard(4, range(1, 3), pads=True))
    assert len(walk_shares(source, 0, batch=1, sample=8)) == 2
    assert data.counts.nonzero().flatten().tolist() == [9, 10, 13, 14, 17, 18, 21, 22]
    assert data.counts.sum() == 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_replica_gets_the_same_data_in_training_and_evaluation(num_workers: int) -> None:
    open_one = augmented(num_workers=num_workers)
    alone, shared = (open_one(share) for share in (LONE, Shard(1, range(1), pads=False)))
    for epoch in (0, 1):
        assert same(walk_shares(shared, epoch), walk_shares(alone, epoch))
    assert shared.num_batches() == alone.num_batches()
    assert shared.indices(1, batch=2, sample=4) == alone.indices(1, batch=2, sample=4)
    assert shared.description == alone.description


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fetch_that_would_end_the_epoch_is_an_error(num_workers: int) -> None:
    how = {"batch_size": 1, "num_workers": num_workers}
    source = opener(Failing(StopIteration()), **how)(Shard(2, range(2), pads=True))
    with pytest.raises(UsageError, match="must not raise StopIteration, but did in batch 1"):
        walk_shares(source, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_that_is_closed_gives_nothing_more_and_leaves_no_worker(num_workers: int) -> None:
    source = opener(range(40), batch_size=2, num_workers=num_workers)(Shard(2, range(2), pads=True))
    batches = source.batches(0)
    assert as_lists(next(batches)) == [[0, 2], [1, 3]]
    batches.close()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
    assert not multiprocessing.active_children()


def test_persistent_workers_live_from_pass_to_pass() -> None:
    how = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    source = opener(range(9), **how)(Shard(2, range(1), pads=True))
    first = as_lists(join(walk_shares(source, 0)))
    (worker,) = multiprocessing.active_children()
    assert as_lists(join(walk_shares(source, 1))) == first
    assert multiprocessing.active_children() == [worker]
    source.close()
    assert not multiprocessing.active_children()


def test_a_fetch_runs_under_one_thread() -> None:
    torch.set_num_threads(2)
    try:
        source = opener(Threads(), batch_size=1)(Shard(2, range(2), pads=True))
        assert walk_shares(source, 0) == [[torch.tensor([1])] * 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


class Threads(Indices):
    """Samples that are the number of threads of the process that fetches them."""

    def __init__(self) -> None:
        super().__init__(2)

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()

"""Samplers of shares, of users too, and samplers with state, where a run's replicas share data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler

from helios.data.samplers import ResumableDistributedSampler
from helios.data.source import LONE, ByPosition, Shard
from helios.errors import ArgumentError
from tests.data.datasets import as_lists, join, walk
from tests.data.shards import Run, dealt, opener, order_of
from tests.data.test_order import Remembering


def test_a_sampler_of_shares_gives_its_whole_order_whatever_its_rank() -> None:
    order = order_of(23, shuffle=True, random_seed=5)
    for rank in range(4):
        how = {"sampler": lambda: ResumableDistributedSampler(range(23), 4, rank, seed=5)}  # noqa: B023
        assert Run(opener(range(23), batch_size=2, **how), 3, 4).indices() == dealt(order, 4, 2)
    cutting = ResumableDistributedSampler(range(23), 4, 1, seed=5, drop_last=True)
    run = Run(opener(range(23), batch_size=2, sampler=lambda: cutting), 3, 4)
    assert run.indices() == dealt(order, 4, 2, cuts=True)
    assert run.sources[0].num_batches() == 3


class Own(ResumableDistributedSampler):
    """Decides itself what its share is: a run of neighbours."""

    def __iter__(self) -> Iterator[int]:
        length = len(self.dataset) // self.num_replicas
        return iter(range(self.rank * length, (self.rank + 1) * length))


_OWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "steps": lambda rank: {"batch_size": 2, "sampler": Own(range(12), 3, rank)},
    "lists": lambda rank: {"batch_sampler": BatchSampler(Own(range(12), 3, rank), 2, False)},
}


@pytest.mark.parametrize("kind", _OWN)
def test_a_sampler_that_splits_by_rank_itself_is_used_where_each_process_has_one_replica(
    kind: str,
) -> None:
    def open_rank(share: Shard) -> Any:
        assert share is not None
        return opener(range(12), **_OWN[kind](share.block.start))(share)

    run = Run(open_rank, 3, 3)
    full = run.indices()
    assert full == [
        [[4 * r, 4 * r + 1] for r in range(3)],
        [[4 * r + 2, 4 * r + 3] for r in range(3)],
    ]
    assert run.told == [(6, False), (6, True)]
    assert run.indices(batch=1, sample=6) == full[1:]
    source = run.sources[0]
    assert source.num_batches(batch=1, sample=6) == 2
    assert (source.resumes_by, source.ends_together) == (ByPosition(is_split_by_rank=True), False)
    assert not source.state_is_per_process
    assert source.indices(0) is None
    for share in (Shard(3, range(2), pads=True), Shard(3, range(2, 3), pads=True)):
        with pytest.raises(ArgumentError, match="Derive it from ResumableSampler"):
            opener(range(12), **_OWN[kind](0))(share)
    with pytest.raises(ArgumentError, match="must be the number of replicas of the run, 2, got 3"):
        opener(range(12), **_OWN[kind](0))(Shard(2, range(1), pads=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_with_state_is_put_back_and_left_where_it_stood(num_workers: int) -> None:
    how = {"sampler": lambda: Remembering(1_103), "num_workers": num_workers}

    def open_run(num_processes: int) -> Run:
        return Run(opener(range(1_103), batch_size=7, **how), num_processes, 3)

    alone = opener(range(1_103), batch_size=21, **how)(LONE)
    walk(alone, 0, limit=2)
    following = dealt(join(as_lists(walk(alone, 1))), 3, 7)
    for num_processes in (1, 3):
        run = open_run(num_processes)
        run.indices(0, limit=2)
        states = [source.state_dict() for source in run.sources]
        assert run.indices(1) == following
        resumed = open_run(2)
        for source in resumed.sources:
            source.load_state_dict(states[-1])
        assert resumed.indices(1) == following

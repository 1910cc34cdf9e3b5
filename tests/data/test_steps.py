"""Training without data: batches are numbers that follow from the position."""

from __future__ import annotations

from functools import partial

import pytest

from helios.data import Steps
from helios.data.phase_sources import open_source
from helios.data.source import LONE, Shard, Source
from tests.data.datasets import FETCH, join, walk
from tests.data.shards import SPLITS, Run


def open_steps(share: Shard = LONE, n: int | None = 5) -> Source:
    return open_source(Steps(n), run_seed=4, purpose=FETCH, share=share)


@pytest.mark.shows("P55")
@pytest.mark.parametrize(("num_processes", "num_replicas"), SPLITS)
def test_each_step_of_each_replica_has_a_number_of_its_own(
    num_processes: int, num_replicas: int
) -> None:
    run = Run(partial(open_steps), num_processes, num_replicas)
    numbers = join(run.walk(0) + run.walk(1))
    assert numbers == list(range(10 * num_replicas))
    assert run.told == [(num_replicas, i == 4) for i in range(5)]
    assert run.walk(1, batch=3) == run.walk(1)[3:]


@pytest.mark.shows("P55")
def test_skipped_steps_leave_the_numbers_of_all_others() -> None:
    source = open_steps()
    source.skip([(0, 1), (0, 4), (2, 0)])
    batches = source.batches(0)
    told = [(next(batches), batches.skipped, batches.is_last) for _ in range(3)]
    assert told == [([0], (0, 0), False), ([2], (1, 1), False), ([3], (0, 0), True)]
    assert [walk(source, epoch) for epoch in (1, 2)] == [[5, 6, 7, 8, 9], [11, 12, 13, 14]]
    assert source.measure(0, batch=3, sample=3) == (3, 2)

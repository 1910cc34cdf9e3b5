"""Dealing out: what replicas get follows from their numbers, whichever processes carry them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from torch.utils.data import BatchSampler, RandomSampler

from helios.data.phase_sources import open_sources
from helios.data.samplers import ResumableDistributedSampler
from helios.data.source import LONE, NO_BATCH, Shard
from helios.errors import ArgumentError
from tests.data.datasets import FETCH, join
from tests.data.shards import SPLITS, Run, dealt, dealt_once, opener, order_of
from tests.data.test_order import Lazy, Reusing

LENGTHS = (1, 2, 5, 6, 12, 23)


@pytest.mark.shows("H9", "R42", "R46")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("num_processes", "num_replicas"), SPLITS)
def test_replicas_get_what_pytorch_deals_out_on_any_number_of_processes(
    num_processes: int, num_replicas: int, shuffle: bool, drop_last: bool
) -> None:
    for length in LENGTHS:
        for size in (1, 2, 5):
            how = {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last}
            if length < size and drop_last:
                continue  # refused for one replica, too
            run = Run(opener(range(length), **how), num_processes, num_replicas)
            for epoch in (0, 1):
                order = order_of(length, epoch, shuffle=shuffle)
                expected = dealt(order, num_replicas, size, drop_last=drop_last)
                assert run.indices(epoch) == expected
                counted = [(len(join(turn)), turn is expected[-1]) for turn in expected]
                assert run.told == counted
            assert run.sources[0].num_batches() == len(expected)


def _places(turns: list[list[Any]], told: list[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """Return the places between the iterations of a pass, both ends included."""
    sample = 0
    for batch in range(len(turns) + 1):
        yield batch, sample
        sample += told[batch][0] if batch < len(told) else 0


_ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": 2},
    "shuffled": {"batch_size": 3, "shuffle": True},
    "dropped": {"batch_size": 3, "shuffle": True, "drop_last": True},
    "single": {"batch_size": None, "shuffle": True},
    "drawn": {"batch_size": 2, "sampler": lambda: Lazy(23)},
    "dealt by a sampler": {
        "batch_size": 2,
        "sampler": lambda: ResumableDistributedSampler(range(23), 1, 0, seed=2),
    },
    "lists": {"batch_sampler": lambda: [[0, 1], [2], [3, 4, 5], [6], [7, 8]]},
    "grouped": {"batch_sampler": lambda: BatchSampler(RandomSampler(range(23)), 2, False)},
    "cut": {"batch_sampler": lambda: BatchSampler(RandomSampler(range(23)), 2, True)},
    "reusing": {"batch_sampler": Reusing},
}


def _fit(case: str, num_replicas: int) -> dict[str, Any]:
    options = dict(_ORDERS[case])
    if case == "dealt by a sampler":
        options["sampler"] = lambda: ResumableDistributedSampler(range(23), num_replicas, 0, seed=2)
    return options


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("case", _ORDERS)
def test_a_pass_goes_on_exactly_from_every_place(case: str, pads: bool) -> None:
    for num_processes, num_replicas in [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (2, 5), (4, 5)]:
        open_one = opener(range(101), **_fit(case, num_replicas))
        whole = Run(open_one, num_replicas, num_replicas, pads=pads)
        for epoch in (0, 1):
            full = whole.indices(epoch)
            for batch, sample in _places(full, whole.told):
                run = Run(open_one, num_processes, num_replicas, pads=pads)
                assert run.indices(epoch, batch=batch, sample=sample) == full[batch:]
                number = run.sources[-1].num_batches(batch=batch, sample=sample)
                assert number == (None if case == "reusing" else len(full))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_processes", "num_replicas"), SPLITS)
def test_an_evaluation_gives_each_sample_once(
    num_processes: int, num_replicas: int, drop_last: bool
) -> None:
    for length in LENGTHS:
        for size in (1, 2, 5):
            if length < size and drop_last:
                continue
            # Not even False against sharing makes a sample count twice.
            how = {"batch_size": size, "drop_last": drop_last, "is_distributed": False}
            open_one = opener(range(length), shuffle=True, **how)
            run = Run(open_one, num_processes, num_replicas, pads=False)
            expected = dealt_once(
                order_of(length, shuffle=True), num_replicas, size, drop_last=drop_last
            )
            assert run.indices() == expected
            assert run.sources[0].num_batches() == len(expected)
            seen = [
                i for turn in expected for batch in turn if batch is not NO_BATCH for i in batch
            ]
            assert drop_last or sorted(seen) == list(range(length))


@pytest.mark.parametrize("how", [{"shuffle": True}, {"sampler": lambda: Lazy(23)}])
def test_data_that_is_not_shared_goes_to_each_replica_whole(how: dict[str, Any]) -> None:
    order = order_of(23, **how)
    whole = [order[i : i + 4] for i in range(0, 23, 4)]
    for num_processes, num_replicas in SPLITS:
        run = Run(
            opener(range(23), batch_size=4, is_distributed=False, **how),
            num_processes,
            num_replicas,
        )
        full = run.indices()
        assert full == [[batch] * num_replicas for batch in whole]
        for batch, sample in _places(full, run.told):
            assert sample == min(batch * 4, 23) * num_replicas
            assert run.indices(batch=batch, sample=sample) == full[batch:]
            assert run.sources[0].num_batches(batch=batch, sample=sample) == 6
        description = run.sources[0].description
        assert description.get("is_distributed") is (False if num_replicas > 1 else None)


def test_training_without_an_iteration_for_everybody_is_refused() -> None:
    pair = (opener(range(5), batch_size=2, drop_last=True)(LONE).loader, None)
    how: dict[str, Any] = {"run_seed": 0, "purpose": FETCH}
    with pytest.raises(ArgumentError, match="at least one batch for each replica"):
        open_sources(pair, label="training", share=Shard(4, range(4), pads=True), **how)
    assert open_sources(pair, label="validation", share=Shard(2, range(1), pads=False), **how)


def test_a_long_order_is_sought_and_never_walked() -> None:
    length = 10**12

    class Huge:
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> int:
            return index

    run = Run(opener(Huge(), batch_size=3, shuffle=True), 2, 4)
    full = run.indices(sample=4 * 10**10, limit=3)
    assert run.indices(sample=4 * 10**10 + 12, limit=2) == full[1:]
    assert len(set(chain.from_iterable(map(join, full)))) == 36

"""The samplers: orders of epochs, from any batch and any position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from torch.utils.data import DistributedSampler

from helios.data.order import is_positional
from helios.data.samplers import (
    SAMPLER_REGISTRY,
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
    create_sampler,
)
from helios.errors import ArgumentError

DATA = range(23)


def make_all(batch_size: int = 4) -> list[ResumableSamplerType]:
    return [
        ResumableRandomSampler(DATA, seed=3, batch_size=batch_size),
        ResumableSequentialSampler(DATA, batch_size=batch_size),
        ResumableDistributedSampler(DATA, 4, 1, seed=3, batch_size=batch_size),
        ResumableDistributedSampler(DATA, 4, 3, shuffle=False, batch_size=batch_size),
    ]


@pytest.mark.shows("H11", "H14")
@pytest.mark.parametrize("sampler", make_all(), ids=lambda s: type(s).__name__)
def test_a_later_start_gives_the_tail_of_the_full_order(sampler: ResumableSamplerType) -> None:
    # H11, H14: start_iter counts batches, in the distributed sampler too.
    full = list(sampler)
    for start in range(8):
        sampler.start_iter = start
        assert list(sampler) == full[start * 4 :]
        assert sampler.start_iter == start


@pytest.mark.shows("H14")
@pytest.mark.parametrize("sampler", make_all(), ids=lambda s: type(s).__name__)
def test_the_length_is_the_full_one_whatever_the_start(sampler: ResumableSamplerType) -> None:
    full = len(list(sampler))
    sampler.start_iter = 2
    assert len(sampler) == full


@pytest.mark.parametrize("sampler", make_all(), ids=lambda s: type(s).__name__)
def test_any_position_gives_the_tail(sampler: ResumableSamplerType) -> None:
    assert is_positional(sampler)
    full = list(sampler)
    for start in range(len(full) + 1):
        assert list(chain.from_iterable(sampler.blocks(start))) == full[start:]


@pytest.mark.shows("H11")
def test_the_random_order_depends_on_seeds_and_epoch_only() -> None:
    # H11, DESIGN R1: nothing is added up, so seed 1 in epoch 0 is not seed 0 in epoch 1.
    orders = set()
    for run_seed, seed, epoch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
        sampler = ResumableRandomSampler(DATA, seed)
        sampler.run_seed = run_seed
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert sorted(order) == list(DATA)
        torch.rand(1)
        assert list(sampler) == order
        orders.add(tuple(order))
    assert len(orders) == 5


def test_orders_leave_the_generators_alone() -> None:
    before = torch.get_rng_state()
    for sampler in make_all():
        list(sampler)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 23])
@pytest.mark.parametrize("num_replicas", [1, 3, 4])
def test_shares_are_those_of_pytorch(length: int, num_replicas: int, drop_last: bool) -> None:
    if drop_last and length < num_replicas:
        return
    for rank in range(num_replicas):
        how = {"shuffle": False, "drop_last": drop_last}
        ours = ResumableDistributedSampler(range(length), num_replicas, rank, **how)
        theirs = DistributedSampler(range(length), num_replicas, rank, **how)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_shuffled_shares_deal_the_one_order_out_in_turn() -> None:
    whole = list(ResumableRandomSampler(DATA, seed=5))
    shares = [list(ResumableDistributedSampler(DATA, 4, rank, seed=5)) for rank in range(4)]
    dealt = [index for turn in zip(*shares, strict=True) for index in turn]
    assert dealt == [*whole, whole[0]]


def test_shares_of_a_long_order_cross_its_blocks() -> None:
    length = 140_001
    shares = [list(ResumableDistributedSampler(range(length), 3, rank)) for rank in range(3)]
    counts = Counter(chain.from_iterable(shares))
    assert counts.keys() == set(range(length))
    late = ResumableDistributedSampler(range(length), 3, 2)
    assert list(chain.from_iterable(late.blocks(30_000))) == shares[2][30_000:]


def test_a_long_sequence_is_cut_into_blocks() -> None:
    sampler = ResumableSequentialSampler(range(10_000))
    assert list(chain.from_iterable(sampler.blocks(17))) == list(range(17, 10_000))
    assert max(len(block) for block in sampler.blocks(0)) < 10_000


def test_an_overridden_order_is_not_taken_for_a_positional_one() -> None:
    class Backwards(ResumableRandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(sorted(super().__iter__(), reverse=True))

    class Renamed(ResumableRandomSampler):
        """Changes nothing."""

    class Even(ResumableSequentialSampler):
        def blocks(self, start: int = 0) -> Iterator[list[int]]:
            yield list(range(0, len(self), 2))[start:]

    assert not is_positional(Backwards(DATA))
    assert is_positional(Renamed(DATA))
    assert is_positional(Even(DATA))
    assert not is_positional(range(3))


def test_a_negative_start_is_refused() -> None:
    for sampler in make_all():
        with pytest.raises(ArgumentError, match="start_iter must be the number of a batch"):
            sampler.start_iter = -1


def test_the_base_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ResumableSampler(4)


def test_samplers_are_found_by_name() -> None:
    names = ["ResumableDistributedSampler", "ResumableRandomSampler", "ResumableSequentialSampler"]
    assert sorted(SAMPLER_REGISTRY.keys()) == names
    sampler = create_sampler("ResumableRandomSampler", DATA, seed=3, batch_size=4)
    assert list(sampler) == list(ResumableRandomSampler(DATA, seed=3))


def test_what_is_not_given_counts_as_0_and_batches_as_single_samples() -> None:
    sampler = ResumableRandomSampler(DATA)
    full = list(sampler)
    assert full == list(ResumableRandomSampler(DATA, seed=0))
    sampler.start_iter = 3
    assert list(sampler) == full[3:]
    shares = [ResumableDistributedSampler(DATA, 4, 1, **seed) for seed in ({}, {"seed": 0})]
    assert list(shares[0]) == list(shares[1])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [5, 8, 11])
def test_shares_of_data_that_has_grown_are_measured_like_those_of_a_new_sampler(
    length: int, drop_last: bool
) -> None:
    data = [0]
    sampler = ResumableDistributedSampler(data, 4, 1, shuffle=False, drop_last=drop_last)
    data += range(1, length)
    fresh = ResumableDistributedSampler(data, 4, 1, shuffle=False, drop_last=drop_last)
    assert list(sampler) == list(fresh)
    assert (sampler.num_samples, sampler.total_size) == (fresh.num_samples, fresh.total_size)

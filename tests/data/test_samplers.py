"""The samplers: orders of epochs, from any batch and any position."""

from __future__ import annotations

import pytest
import torch

from helios.data.samplers import (
    SAMPLER_REGISTRY,
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
    create_sampler,
)

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
    # Start_iter counts batches, in the distributed sampler too.
    full = list(sampler)
    for start in range(8):
        sampler.start_iter = start
        assert list(sampler) == full[start * 4 :]
        assert len(sampler) == len(full)
        assert sampler.start_iter == start


@pytest.mark.shows("H11")
def test_the_random_order_depends_on_seeds_and_epoch_only() -> None:
    # Nothing is added up, so seed 1 in epoch 0 is not seed 0 in epoch 1.
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


def test_samplers_are_found_by_name() -> None:
    names = ["ResumableDistributedSampler", "ResumableRandomSampler", "ResumableSequentialSampler"]
    assert sorted(SAMPLER_REGISTRY.keys()) == names
    sampler = create_sampler("ResumableRandomSampler", DATA, seed=3, batch_size=4)
    assert list(sampler) == list(ResumableRandomSampler(DATA, seed=3))

"""Keys beside indices: how lists are cut, which streams they get, what torch sees of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from helios.core import rng
from helios.data import create_dataloader
from helios.data.keyed import Keyed, KeyedBatchSampler
from helios.data.order import Position, PositionalOrder
from helios.data.samplers import ResumableRandomSampler, ResumableSequentialSampler
from helios.data.sharding_plan import ShardingPlan
from helios.data.source import LONE
from tests.data.datasets import Augmented, Indices, join


def make_order(length: int, *, shuffle: bool = False) -> PositionalOrder:
    kind = ResumableRandomSampler if shuffle else ResumableSequentialSampler
    return PositionalOrder(kind(range(length)))


def make_batches(length: int, batch_size: int | None, **options: Any) -> KeyedBatchSampler:
    return KeyedBatchSampler(make_order(length), batch_size=batch_size, **options)


def make_deal(
    length: int, batch_size: int | None, *, drop_last: bool = False, shuffle: bool = False
) -> ShardingPlan:
    order = make_order(length, shuffle=shuffle)
    return ShardingPlan(order, LONE, batch_size=batch_size, drop_last=drop_last)


def pull(deal: ShardingPlan, place: Position) -> list[Keyed]:
    return list(deal.walk(place, deque()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 4, 9, 4_097, 8_191, 70_001])
def test_lists_are_those_of_the_order_cut_by_the_batch_size(length: int, drop_last: bool) -> None:
    whole = list(range(length))
    for size in (1, 3, 5_000):
        deal = make_deal(length, size, drop_last=drop_last)
        expected = [whole[first : first + size] for first in range(0, length, size)]
        if drop_last and len(expected[-1]) < size:
            expected.pop()
        assert [turn.hands for turn in deal.turns(Position())] == [[item] for item in expected]
        by_hand = make_batches(length, size, drop_last=drop_last)
        assert [item.indices for item in by_hand] == expected
        assert len(by_hand) == deal.num_batches() == len(expected)


def test_a_pass_goes_on_from_any_place() -> None:
    batches = make_deal(23, 4, shuffle=True)
    for epoch in range(3):
        full = pull(batches, Position(run_seed=5, epoch=epoch))
        assert sorted(join(item.indices for item in full)) == list(range(23))
        for batch in range(7):
            place = Position(run_seed=5, epoch=epoch, batch=batch, sample=batch * 4)
            assert pull(batches, place) == full[batch:]


def test_the_key_depends_on_everything_that_names_a_batch() -> None:
    places = [
        Position(),
        Position(run_seed=1),
        Position(epoch=1),
        Position(purpose="fetch-validation"),
        Position(repeat=1),
    ]
    keys = {place.fetch_keys().at(batch) for place in places for batch in (0, 1)}
    assert len(keys) == 10
    assert Position(run_seed=7, epoch=3).fetch_keys().at(2) == rng.key(7, "fetch", 3, 2, 0)


def test_by_hand_a_loader_begins_where_its_sampler_says() -> None:
    loader, sampler = create_dataloader(Indices(10), 7, 3, shuffle=True)
    sampler.set_epoch(2)
    full = [batch.tolist() for batch in loader]
    assert len(loader) == len(full) == 4
    sampler.start_iter = 2
    assert [batch.tolist() for batch in loader] == full[2:]
    assert [batch.tolist() for batch in loader] == full[2:]


def test_by_hand_augmentation_follows_the_epoch_and_never_repeats() -> None:
    def augment(epoch: int | None, start: int = 0) -> torch.Tensor:
        if epoch is not None:
            sampler.set_epoch(epoch)
        sampler.start_iter = start
        return torch.cat(list(loader))[:, 1:]

    loader, sampler = create_dataloader(Augmented(6), batch_size=2)
    first, second, again = augment(0), augment(1), augment(1)
    assert not torch.equal(first, second)
    assert not torch.equal(second, again)
    loader, sampler = create_dataloader(Augmented(6), batch_size=2)
    assert torch.equal(augment(1, start=1), second[2:])

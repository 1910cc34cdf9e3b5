"""Keys beside indices: how lists are cut, which streams they get, what torch sees of them."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

from helios.core import rng
from helios.data import create_dataloader
from helios.data.keyed import Keyed, KeyedBatchSampler, KeyedDataset
from helios.data.order import Position, PositionalOrder
from helios.data.phase_sources import open_source
from helios.data.samplers import ResumableRandomSampler, ResumableSequentialSampler
from helios.data.sharding_plan import ShardedIteration, ShardingPlan
from helios.data.source import LONE
from tests.data.datasets import Augmented, Indices, Lone, draw, join


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


def test_a_changed_batch_size_goes_on_at_the_stored_sample() -> None:
    # DESIGN section 6: batches are numbered on, samples follow the position.
    order = join(item.indices for item in pull(make_deal(23, 4, shuffle=True), Position()))
    place = Position(batch=2, sample=8)
    rest = pull(make_deal(23, 6, shuffle=True), place)
    assert [item.indices for item in rest] == [order[8:14], order[14:20], order[20:]]
    assert [item.key for item in rest] == [place.fetch_keys().at(batch) for batch in (2, 3, 4)]


def test_the_number_of_batches_counts_those_before_and_behind_the_place() -> None:
    for drop_last, whole, resumed in ((False, 6, 5), (True, 5, 4)):
        assert make_deal(23, 4, drop_last=drop_last).num_batches() == whole
        changed = make_deal(23, 6, drop_last=drop_last)
        assert changed.num_batches(batch=2, sample=8) == resumed
    assert make_deal(8, 4).num_batches(batch=2, sample=8) == 2
    assert make_deal(5, None).num_batches(batch=3, sample=3) == 5


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


def test_each_batch_is_listed_as_under_way_though_torch_reads_ahead() -> None:
    batches, deal = make_batches(10, 4), make_deal(10, 4)
    under_way: deque[ShardedIteration] = deque()
    batches.seek(partial(deal.walk, Position(), under_way))
    iter(batches)  # torch calls iter() twice, and steps through the second only
    steps = iter(batches)
    next(steps)
    next(steps)
    assert [(len(turn.hands), *turn[1:], is_last) for turn, is_last in under_way] == [
        (1, 4, (0, 0), (), False),
        (1, 4, (0, 0), (), False),
    ]
    next(steps)
    assert [(*map(len, turn.hands), is_last) for turn, is_last in under_way] == [
        (4, False),
        (4, False),
        (2, True),
    ]


class TwoWays(Indices):
    """Fetches a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [("at once", index, *draw()) for index in indices]


def test_the_fetch_is_seeded_and_uses_what_the_data_set_has() -> None:
    keyed = KeyedDataset(TwoWays(5))
    rng.reseed(99)
    expected = [("at once", 3, *draw()), ("at once", 1, *draw())]
    assert keyed.__getitems__(Keyed(99, [3, 1])) == expected
    single = KeyedDataset(Augmented(5))
    rng.reseed(99)
    drawn = draw()
    assert single.__getitems__(Keyed(99, [3]))[0].tolist() == [3, *drawn]
    assert single[Keyed(99, 4)].tolist() == [4, *drawn]


def test_the_data_set_of_the_user_stays_reachable() -> None:
    data = Indices(5)
    loader, _ = create_dataloader(data)
    assert loader.dataset.dataset is data
    assert len(loader.dataset) == 5
    assert loader.dataset[3] == 3
    assert loader.dataset.__getitems__([1, 2]) == [1, 2]


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


def test_by_hand_a_loader_leaves_the_generators_as_it_finds_them() -> None:
    loader, _ = create_dataloader(Augmented(6), batch_size=2, shuffle=True)
    rng.seed_rngs(5)
    expected = [draw() for _ in range(4)]
    rng.seed_rngs(5)
    found = [draw()]
    for _ in loader:
        found.append(draw())
    assert found == expected


def test_random_is_seeded_with_the_left_overs_of_gauss() -> None:
    # random.gauss caches every second number; left over, it would shift the next batch.
    keyed = KeyedDataset(Indices(3))
    random.gauss(0, 1)
    keyed[Keyed(1, 0)]
    first = random.gauss(0, 1)
    keyed[Keyed(1, 0)]
    assert random.gauss(0, 1) == first


class HoldsGenerator(torch.utils.data.Dataset):
    """A data set that keeps the package's generator from its construction on."""

    def __init__(self) -> None:
        self.numpy = rng.get_default_numpy_rng()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.numpy.generator.normal()


def test_a_held_generator_is_the_one_that_is_seeded_also_in_spawned_workers() -> None:
    rng.seed_rngs(3)
    found = []
    for workers in ({}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}):
        loader, sampler = create_dataloader(HoldsGenerator(), batch_size=4, **workers)
        source = open_source(loader, sampler, run_seed=1, purpose="fetch")
        found.append([batch.tolist() for batch in Lone(source.batches(0))])
        source.close()
    assert found[0] == found[1] == found[2]

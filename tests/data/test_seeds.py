"""What the seed of the order changes, and what that of fetching: in our loaders, and in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from helios.core import rng
from helios.data import create_dataloader
from helios.data.order import Position
from helios.data.phase_sources import open_source
from helios.data.samplers import ResumableSampler
from tests.data.datasets import FETCH, Augmented, draw, walk

LENGTH = 13
IDS, NOISE = "ids", "noise"


class Shuffled(ResumableSampler):
    """A user's sampler, which draws its order."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())

    def __len__(self) -> int:
        return LENGTH


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of its own positions, with noise."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(LENGTH):
            yield torch.tensor([index, *draw()], dtype=torch.float64)


def ours(**options: Any) -> Callable[[], Any]:
    return lambda: create_dataloader(Augmented(LENGTH), batch_size=3, **options)


def batches() -> BatchSampler:
    return BatchSampler(RandomSampler(range(LENGTH)), 3, drop_last=False)


def of_the_user(num_workers: int) -> Callable[[], Any]:
    data = Augmented(LENGTH)
    method = "fork" if num_workers else None
    return lambda: (
        DataLoader(data, 3, shuffle=True, num_workers=num_workers, multiprocessing_context=method),
        None,
    )


@pytest.mark.shows("P28")
@pytest.mark.parametrize(
    ("make", "by_order", "by_fetching"),
    [
        (ours(shuffle=True), {IDS}, {NOISE}),
        (ours(shuffle=True, num_workers=2), {IDS}, {NOISE}),
        (ours(), set(), {NOISE}),
        (ours(sampler=Shuffled()), {IDS}, {NOISE}),
        (lambda: create_dataloader(Augmented(LENGTH), batch_sampler=batches()), {IDS}, {NOISE}),
        (ours(shuffle=True, is_distributed=True, num_replicas=1), {IDS}, {NOISE}),
        (lambda: create_dataloader(Numbers(), batch_size=3), set(), {NOISE}),
        (of_the_user(0), set(), {IDS, NOISE}),
        (of_the_user(2), {IDS, NOISE}, set()),
    ],
    ids=[
        *("shuffled", "workers", "in order", "sampler", "batch sampler", "distributed", "stream"),
        *("own loader", "own loader with workers"),
    ],
)
def test_each_seed_changes_what_is_its_own(
    make: Callable[[], Any], by_order: set[str], by_fetching: set[str]
) -> None:
    def look(run_seed: int, fetch_seed: int) -> dict[str, bytes]:
        seeds = {"run_seed": run_seed, "fetch_seed": fetch_seed}
        source = open_source(*make(), purpose=FETCH, **seeds)
        found = torch.cat(walk(source, 1))
        source.close()
        assert sorted(found[:, 0].tolist()) == list(range(LENGTH))
        return {IDS: found[:, 0].numpy().tobytes(), NOISE: found[:, 1:].numpy().tobytes()}

    known = look(1, 2)
    for other, expected in ((look(3, 2), by_order), (look(1, 4), by_fetching)):
        assert {name for name in known if known[name] != other[name]} == expected
    assert look(1, 2) == known


def test_without_a_seed_of_its_own_fetching_has_that_of_the_order() -> None:
    for position in (Position(7, epoch=3), Position(1, epoch=3, fetch_seed=7)):
        assert position.fetch_keys().at(2) == rng.key(7, FETCH, 3, 2, 0)
        assert position.worker_key() == rng.key("workers", 7, 3)
        assert position.worker_key(2) == rng.key("workers", 7, 3, 2)
    assert Position(1, epoch=3, fetch_seed=0).fetch_keys().at(2) == rng.key(0, FETCH, 3, 2, 0)
    assert Position(1, epoch=3, fetch_seed=7).order_key() == rng.key("order", 1, 3)

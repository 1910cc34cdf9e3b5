"""Skipped batches are never fetched; all others stay what they are, from any position."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from helios.data import DataLoaderParams, create_dataloader
from helios.data.loader import build_loader
from helios.data.phase_sources import open_source
from helios.data.source import Shard, Source
from helios.errors import ArgumentError
from tests.data.datasets import FETCH, Augmented, Indices

LENGTH, SIZE = 11, 3
NUM_BATCHES = 4
SETS = [each for n in (1, 2, 3) for each in itertools.combinations(range(NUM_BATCHES), n)]


def _sampler() -> RandomSampler:
    """Return a sampler whose generator advances from epoch to epoch."""
    generator = torch.Generator().manual_seed(3)
    return RandomSampler(range(LENGTH), generator=generator)


def _open(dataset: Any, *, num_workers: int = 0, **options: Any) -> Source:
    params = DataLoaderParams(batch_size=SIZE, num_workers=num_workers, **options)
    loader, sampler = build_loader(dataset, params)
    return open_source(loader, sampler, run_seed=6691, purpose=FETCH)


def _walk(source: Source, epoch: int, batch: int = 0, sample: int = 0) -> list[tuple[Any, ...]]:
    """Return position and content of each batch, and whether it is the last one."""
    found = []
    batches = source.batches(epoch, batch=batch, sample=sample)
    for (content,) in batches:
        batch, sample = batch + batches.skipped[0], sample + batches.skipped[1]
        found.append((batch, sample, content.tolist(), batches.is_last))
        batch, sample = batch + 1, sample + batches.num_samples
    batches.close()
    return found


@pytest.mark.shows("P51")
@pytest.mark.parametrize("kind", ["computed", "listed", "own"])
def test_all_others_stay_what_they_are(kind: str) -> None:
    def make() -> Source:
        if kind == "computed":
            return _open(Augmented(LENGTH), shuffle=True)
        if kind == "listed":
            firsts = range(0, LENGTH, SIZE)
            listed = [list(range(LENGTH))[first : first + SIZE] for first in firsts]
            loader, _ = create_dataloader(Augmented(LENGTH), batch_sampler=listed)
            return open_source(loader, None, run_seed=6691, purpose=FETCH)
        loader, _ = create_dataloader(Augmented(LENGTH), batch_sampler=_Lists())
        return open_source(loader, None, run_seed=6691, purpose=FETCH)

    whole = make()
    full = [[each[:3] for each in _walk(whole, epoch)] for epoch in range(3)]
    assert len(full[1]) == NUM_BATCHES
    for skipped in SETS:
        source = make()
        source.skip([(1, batch) for batch in skipped])
        assert [each[:3] for each in _walk(source, 0)] == full[0]
        left = [each for each in full[1] if each[0] not in skipped]
        found = _walk(source, 1)
        assert [each[:3] for each in found] == left
        assert [is_last for *_, is_last in found] == [False] * (len(left) - 1) + [True]
        assert [each[:3] for each in _walk(source, 2)] == full[2]
        if kind == "own":
            continue
        for batch, sample, _ in full[1]:
            rest = [each[:3] for each in _walk(source, 1, batch, sample)]
            assert rest == [each for each in left if each[0] >= batch]


class _Lists:
    """A batch sampler that draws from a generator of its own, so that passes follow each other."""

    def __init__(self) -> None:
        self.sampler = _sampler()

    def __iter__(self) -> Any:
        order = list(self.sampler)
        return iter([order[first : first + SIZE] for first in range(0, LENGTH, SIZE)])


@pytest.mark.shows("P51")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_of_a_skipped_batch_is_fetched(num_workers: int) -> None:
    dataset = Augmented(LENGTH)
    source = _open(dataset, num_workers=num_workers)
    source.skip([(0, 0), (0, 2)])
    expected = _walk(_open(Augmented(LENGTH)), 0)
    assert [each[2] for each in _walk(source, 0)] == [expected[1][2], expected[3][2]]
    assert dataset.counts.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    source.close()


@pytest.mark.shows("P60")
def test_a_loader_that_cannot_skip_is_refused() -> None:
    sampler = DistributedSampler(Indices(LENGTH), num_replicas=2, rank=0)  # type: ignore[var-annotated]
    loader, _ = create_dataloader(Indices(LENGTH), batch_sampler=_OwnLists(sampler))
    share = Shard(2, range(1), pads=True)
    own = open_source(loader, None, run_seed=1, purpose=FETCH, share=share)
    foreign = open_source([1, 2, 3], None, run_seed=1, purpose=FETCH)
    for source in (own, foreign):
        with pytest.raises(ArgumentError, match="must be omitted with data whose order"):
            source.skip([(0, 1)])


class _OwnLists(torch.utils.data.BatchSampler):
    """Batches of a sampler that splits the data by rank."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 2, drop_last=False)

"""Loaders that Helios did not make: taken as they are, resumed as far as they can be."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from helios.core import rng
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import ByOwnState, CannotResume, Shard, Source
from helios.errors import StateError
from tests.data.datasets import FETCH, Indices, Lone, as_lists, draw, walk


class Stream(IterableDataset):
    """Five numbers, from the epoch on."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 5))


class Rewinding:
    """A loader with state, which notes the end of a pass only when asked for one batch more."""

    def __init__(self) -> None:
        self.position = 0
        self.num_passes = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 6:
            self.position += 1
            yield 10 * self.num_passes + self.position - 1
        self.position = 0
        self.num_passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "num_passes": self.num_passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.num_passes = state_dict["position"], state_dict["num_passes"]


def open_foreign(loader: Any, sampler: Any = None) -> Source:
    return open_source(loader, sampler, run_seed=4, purpose=FETCH)


def remedy_of(source: Source) -> str:
    assert isinstance(source.resumes_by, CannotResume)
    return source.resumes_by.remedy


def test_a_loader_with_state_goes_on_from_every_batch() -> None:
    def run(source: Source, epoch: int, batch: int) -> list[int]:
        found = walk(source, epoch, batch=batch)
        for later in range(epoch + 1, 3):
            found += walk(source, later)
        return found

    full = run(open_foreign(Rewinding()), 0, 0)
    assert full == [10 * epoch + number for epoch in range(3) for number in range(6)]
    for epoch in range(2):
        for batch in range(7):
            source = open_foreign(Rewinding())
            for earlier in range(epoch):
                walk(source, earlier)
            batches = Lone(source.batches(epoch))
            for _ in range(batch):
                next(batches)
            states = [source.state_dict()]
            batches.close()
            # A pass that was cut is saved again at the end of the run.
            states.append(source.state_dict())
            for number, state in enumerate(states):
                resumed = open_foreign(Rewinding())
                assert isinstance(resumed.resumes_by, ByOwnState)
                resumed.load_state_dict(state)
                if batch == 6 and number == 1:  # behind the pass: the next one follows
                    assert run(resumed, epoch + 1, 0) == full[6 * (epoch + 1) :]
                else:
                    assert run(resumed, epoch, batch) == full[6 * epoch + batch :]


@pytest.mark.shows("S65")
def test_what_cannot_resume_says_what_would() -> None:
    for loader, kind in (
        ([torch.zeros(1)], "list"),
        (DataLoader(Stream()), "Stream"),
        (DataLoader(Indices(4), batch_size=2), "Indices"),
    ):
        remedy = remedy_of(open_foreign(loader))
        assert f"give the {kind} state_dict and load_state_dict" in remedy
        assert "self.create_dataset(dataset, batch_size=" in remedy


def test_a_state_that_does_not_fit_the_loader_is_an_error() -> None:
    plain, with_state = open_foreign(DataLoader(Indices(3))), open_foreign(Rewinding())
    plain.load_state_dict({})
    with pytest.raises(StateError, match="state of the loader in the checkpoint does not fit"):
        plain.load_state_dict(with_state.state_dict())
    with pytest.raises(StateError, match="it contains nothing"):
        with_state.load_state_dict({})


@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_worker_of_a_foreign_loader_is_left(is_persistent: bool) -> None:
    loader = DataLoader(Indices(6), num_workers=1, persistent_workers=is_persistent)
    source = open_foreign(loader)
    assert as_lists(walk(source, 0, limit=2)) == [[0], [1]]
    assert len(multiprocessing.active_children()) == is_persistent
    assert len(walk(source, 1)) == 6
    source.close()
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 6
    source.close()


def open_rank(loader: Any, rank: int, num_replicas: int = 3) -> Source:
    share = Shard(num_replicas, range(rank, rank + 1), pads=True)
    return open_source(loader, run_seed=4, purpose=FETCH, share=share)


class Drawing(Stream):
    """Numbers of all generators."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(draw(), dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_draws_other_numbers_on_each_replica(num_workers: int) -> None:
    def drawn(rank: int, epoch: int) -> list[float]:
        loader, _ = create_dataloader(Drawing(), num_workers=num_workers)
        found = walk(open_rank(loader, rank), epoch)
        return [number for (batch,) in found for number in batch.flatten().tolist()]

    numbers = [drawn(rank, epoch) for rank in range(3) for epoch in range(2)]
    assert len(set(sum(numbers, []))) == 3 * 2 * 2 * 3  # noqa: RUF017 - a few items
    assert drawn(2, 1) == numbers[-1]
    if not num_workers:
        rng.reseed(rng.key(4, FETCH, 1, 0, 2))
        assert numbers[-1][:3] == draw()


def test_a_stream_is_walked_and_its_last_batch_is_known() -> None:
    source = open_foreign(*create_dataloader(Stream(), batch_size=2))
    batches = Lone(source.batches(0))
    told = [(batch.tolist(), batches.is_last, batches.num_samples) for batch in batches]
    assert told == [([0, 1], False, 0), ([2, 3], False, 0), ([4], True, 0)]
    assert source.num_batches() is None
    assert isinstance(source.resumes_by, CannotResume)
    assert source.state_dict() == {}

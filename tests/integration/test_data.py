"""Data as users bring it, through whole runs: samplers, foreign loaders, workers, odd sizes.

What resumes is restarted from every checkpoint and compared on bits; what cannot resume is refused
where checkpoints are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

import helios
from helios.data.samplers import ResumableSampler
from tests.data.datasets import join
from tests.support.resume import copy_checkpoint, iteration_of, restarts_of
from tests.support.runs import (
    NUM_SAMPLES,
    IndexData,
    Setting,
    SmallModel,
    digest,
    noisy_collate,
)

_SETTING = Setting(scheduler="none")


class Data(helios.DataModule):
    """A training set with the options under test."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__()
        self.dataset, self.options = dataset, options

    def setup(self) -> None:
        params = helios.DataLoaderParams(collate_fn=noisy_collate, **self.options)
        self._train_dataset = self._create_dataset(self.dataset, params)


def fit(data: Data, folder: Path, **options: Any) -> SmallModel:
    """Train eight steps, with a checkpoint after each."""
    given = {"train_unit": "iteration", "total_steps": 8, "random_seed": 5}
    given |= {"chkpt_root": folder, "chkpt_frequency": 1, "use_cpu": True, "print_banner": False}
    model = SmallModel(_SETTING)
    helios.Trainer(**{**given, **options}).fit(model, data)
    return model


def ids_of(model: SmallModel) -> list[list[int]]:
    """Return the samples of each batch."""
    return [ids for _, (ids, _) in sorted(model.records.items())]


def check_resumes(make_data: Callable[[], Data], folder: Path, **options: Any) -> SmallModel:
    """Restart from the checkpoints, and compare ids, losses and weights on bits."""
    whole = fit(make_data(), folder / "whole", **options)
    weights = digest(whole.discovery.capture()["objects"])
    checkpoints = sorted((folder / "whole").glob("*/*.pth"))
    unfinished = sorted(checkpoints, key=iteration_of)[:-1]
    assert len(unfinished) >= 2
    for path in restarts_of(unfinished):
        number = iteration_of(path)
        root = copy_checkpoint(path, folder / f"from-{number}")
        resumed = fit(make_data(), root, **options)
        tail = {n: record for n, record in whole.records.items() if n > number}
        assert resumed.records == tail, f"resumed after iteration {number}"
        assert digest(resumed.discovery.capture()["objects"]) == weights
    return whole


class Stream(IterableDataset):
    """Samples that come one after another, with noise."""

    def __iter__(self) -> Iterator[Any]:
        data = IndexData(10)
        return (data[index] for index in range(10))


class StatefulStream(Stream):
    """The same with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        data = IndexData(10)
        while self.position < 10:
            self.position += 1
            yield data[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


@pytest.mark.shows("S65")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_stream_with_state_resumes_from_every_step(unit: str, tmp_path: Path) -> None:
    options = {"train_unit": unit, "total_steps": 8 if unit == "iteration" else 4}
    whole = check_resumes(lambda: Data(StatefulStream(), batch_size=4), tmp_path, **options)
    assert ids_of(whole)[:6] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2


class EvenFirst(ResumableSampler):
    """A user's sampler: steps, and draws a random tail."""

    def __init__(self) -> None:
        super().__init__(batch_size=4)

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.epoch % 2, NUM_SAMPLES, 2), *torch.randperm(9).tolist()]
        return iter(order[self.start_iter * 4 :])

    def __len__(self) -> int:
        return 20


@pytest.mark.shows("H11", "L17")
def test_a_users_sampler_resumes_exactly(tmp_path: Path) -> None:
    whole = check_resumes(
        lambda: Data(IndexData(), batch_size=4, sampler=EvenFirst()), tmp_path, total_steps=12
    )
    first = join(ids_of(whole)[:5])
    assert first[:11] == list(range(0, NUM_SAMPLES, 2))
    assert join(ids_of(whole)[5:10])[:11] == list(range(1, NUM_SAMPLES, 2))


class Wrapped(Sampler[int]):
    """A sampler around a stock one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def _own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _stock_batches() -> Any:
    return BatchSampler(RandomSampler(range(22), generator=_own_generator()), 4, drop_last=False)


def _drawn_with_replacement() -> Any:
    sampler = RandomSampler(range(22), replacement=True, generator=_own_generator())
    return BatchSampler(Wrapped(sampler), 4, drop_last=False)


@pytest.mark.shows("S66")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [_stock_batches, _drawn_with_replacement])
def test_a_stock_sampler_with_a_generator_of_its_own_resumes_exactly(
    make: Callable[[], Any], num_workers: int, tmp_path: Path
) -> None:
    def data() -> Data:
        return Data(IndexData(), batch_sampler=make(), num_workers=num_workers)

    whole = check_resumes(data, tmp_path, total_steps=14, chkpt_frequency=3 if num_workers else 1)
    first, second = ids_of(whole)[:6], ids_of(whole)[6:12]
    assert first != second

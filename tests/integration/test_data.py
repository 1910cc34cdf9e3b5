"""Samplers as users bring them, through whole runs that are restarted from every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import helios
from helios.data.samplers import ResumableSampler
from tests.data.datasets import join
from tests.support.resume import resume_everywhere
from tests.support.runs import (
    NUM_SAMPLES,
    IndexData,
    IndexModule,
    Setting,
    noisy_collate,
    train,
)


class SampledModule(IndexModule):
    """Data with a sampler of the user's, for training or for validation."""

    def __init__(
        self, setting: Setting, make: Callable[[], dict[str, Any]], *, validates: bool
    ) -> None:
        super().__init__(setting)
        self.make, self.validates = make, validates

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(
            collate_fn=noisy_collate, num_workers=self.setting.num_workers, **self.make()
        )
        dataset = self._create_dataset(IndexData(), params)
        if self.validates:
            self._valid_dataset = dataset
        else:
            self._train_dataset = dataset


def resume(
    folder: Path, make: Callable[[], dict[str, Any]], *, validates: bool = False, **more: Any
) -> list[list[int]]:
    """Restart a run from its checkpoints; returns the samples of each batch."""
    setting = Setting(make_data=partial(SampledModule, make=make, validates=validates), **more)
    whole = resume_everywhere(lambda root: train(root, setting), folder)
    return [ids for ids, _ in whole.records.values()]


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
    ids = resume(tmp_path, lambda: {"batch_size": 4, "sampler": EvenFirst()}, total_steps=12)
    assert join(ids[:5])[:11] == list(range(0, NUM_SAMPLES, 2))
    assert join(ids[5:10])[:11] == list(range(1, NUM_SAMPLES, 2))


class Wrapped(Sampler[int]):
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
@pytest.mark.parametrize(
    ("make", "num_workers"), [(_stock_batches, 0), (_drawn_with_replacement, 2)]
)
def test_a_stock_sampler_with_a_generator_of_its_own_resumes_exactly(
    make: Callable[[], Any], num_workers: int, tmp_path: Path
) -> None:
    more = {"num_workers": num_workers, "chkpt_frequency": 3 if num_workers else 1}
    ids = resume(tmp_path, lambda: {"batch_sampler": make()}, **more)
    assert ids[:6] != ids[6:12]


class ByNumpy(ResumableSampler):
    """Has the generator of NumPy in a list of an object."""

    def __init__(self) -> None:
        super().__init__(batch_size=4)
        self.parts = [{"order": np.random.default_rng(3)}]

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts[0]["order"].permutation(NUM_SAMPLES).tolist())

    def __len__(self) -> int:
        return NUM_SAMPLES


@pytest.mark.shows("S66")
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"batch_sampler": _stock_batches()},
        lambda: {"batch_size": 4, "sampler": ByNumpy()},
    ],
)
def test_a_validation_has_the_order_that_it_would_have_had(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """Scores depend on which samples share a batch."""
    resume(tmp_path, make, validates=True)

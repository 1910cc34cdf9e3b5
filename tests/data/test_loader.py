"""Loaders and their options: what is chosen, what is refused, what is said."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from helios.core import rng
from helios.data import DataLoaderParams, create_dataloader
from helios.data.loader import KeyedBatchSampler
from helios.data.phase_sources import open_source
from helios.data.samplers import (
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSequentialSampler,
)
from helios.errors import ArgumentError, ArgumentTypeError
from tests.data.datasets import FETCH, Indices, as_lists, walk


class Unsized(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.shows("H16")
def test_the_options_have_the_historical_names_and_defaults() -> None:
    historical = {
        "random_seed": 6691,
        "batch_size": 1,
        "shuffle": False,
        "num_workers": 0,
        "pin_memory": True,
        "drop_last": False,
        "debug_mode": False,
        "is_distributed": None,
        "sampler": None,
        "collate_fn": None,
    }
    table = DataLoaderParams().to_dict()
    assert list(table)[: len(historical)] == list(historical)
    assert {name: table[name] for name in historical} == historical
    assert DataLoaderParams.from_dict(table) == DataLoaderParams()
    sampler = ResumableSequentialSampler(range(3))
    more = {"batch_size": 4, "colour": "red", "sampler": sampler}
    assert DataLoaderParams.from_dict(more) == DataLoaderParams(batch_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size=...\) must be an int of at least 1 or None, got 0"),
        ({"worker_timeout": 0}, r"worker_timeout=...\) must be a positive number"),
        ({"shuffle": "false"}, r"shuffle=...\) must be True or False, got 'false'"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "cannot be combined with"),
    ],
)
def test_an_option_that_breaks_its_rule_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        create_dataloader(Indices(3), **options)


@pytest.mark.shows("H10")
@pytest.mark.parametrize("sampler", [torch.utils.data.RandomSampler(range(3)), [2, 1]])
def test_a_sampler_of_another_kind_is_a_type_error(sampler: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="must derive from ResumableSampler or"):
        create_dataloader(Indices(3), sampler=sampler)
    assert issubclass(ArgumentTypeError, TypeError)


@pytest.mark.shows("H9")
def test_the_sampler_is_chosen_by_distribution_and_shuffle() -> None:
    loader, random_order = create_dataloader(Indices(9), 5, 4, True)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.batch_sampler, KeyedBatchSampler)
    assert isinstance(random_order, ResumableRandomSampler)
    assert random_order.seed == 5
    _, sequence = create_dataloader(Indices(9))
    assert isinstance(sequence, ResumableSequentialSampler)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)process group"):
        create_dataloader(Indices(9), is_distributed=True)
    share = ResumableDistributedSampler(range(9), 2, 1, shuffle=False)
    loader, sampler = create_dataloader(Indices(9), batch_size=2, sampler=share)
    assert sampler is share
    assert as_lists(list(loader)) == [[1, 3], [5, 7], [0]]


def test_data_without_a_batch_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="must contain at least one sample, got an empty Indices"
    ):
        create_dataloader(Indices(0))
    with pytest.raises(ArgumentError, match="must have a length, got a Unsized"):
        create_dataloader(Unsized())
    loader, _ = create_dataloader(Indices(3), batch_size=4)
    assert as_lists(list(loader)) == [[0, 1, 2]]


@pytest.mark.shows("H16")
def test_debug_mode_fetches_in_the_training_process(caplog: pytest.LogCaptureFixture) -> None:
    loader, _ = create_dataloader(
        Indices(3), num_workers=2, debug_mode=True, persistent_workers=True, prefetch_factor=3
    )
    assert loader.num_workers == 0
    assert as_lists(list(loader)) == [[0], [1], [2]]
    assert caplog.text == ""


@pytest.mark.shows("E39")
def test_memory_is_pinned_only_where_an_accelerator_is() -> None:
    loader, _ = create_dataloader(Indices(3), pin_memory=True)
    assert loader.pin_memory == torch.cuda.is_available()
    assert create_dataloader(Indices(3), pin_memory=False)[0].pin_memory is False


class InitialNumbers(Dataset):
    """Samples that are what the worker's initialisation left behind."""

    numbers: tuple[float, ...] = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(InitialNumbers.numbers, dtype=torch.float64)


def note_numbers(worker_id: int) -> None:
    numpy_number = float(rng.get_default_numpy_rng().generator.random())
    seed = torch.initial_seed()
    InitialNumbers.numbers = (worker_id, float(seed % 2**32), random.random(), numpy_number)


@pytest.mark.shows("H8")
def test_workers_are_seeded_before_the_function_of_the_user_runs() -> None:
    # Random and the package's NumPy generator from torch.initial_seed() % 2**32.
    loader, _ = create_dataloader(InitialNumbers(), num_workers=1, worker_init_fn=note_numbers)
    (batch,) = list(loader)
    worker_id, seed, number, numpy_number = batch[0].tolist()
    rng.seed_rngs(int(seed), skip_torch=True)
    assert worker_id == 0
    assert number == random.random()
    assert numpy_number == rng.get_default_numpy_rng().generator.random()


def test_the_seed_of_a_worker_follows_from_the_position() -> None:
    def find_seed(*epochs: int) -> list[float]:
        options: Any = {"num_workers": 1, "worker_init_fn": note_numbers}
        source = open_source(
            *create_dataloader(InitialNumbers(), **options), run_seed=1, purpose=FETCH
        )
        return [walk(source, epoch)[0].tolist() for epoch in epochs][-1]

    assert find_seed(0, 1) == find_seed(1)
    assert find_seed(0) != find_seed(1)

"""The data module: what users assign, and what they get."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from helios.data import DataLoaderParams, DataModule, Steps
from helios.data.samplers import ResumableSequentialSampler
from helios.errors import ArgumentTypeError
from tests.data.datasets import Indices, as_lists, join

SPLITS = ("train", "valid", "test", "predict")


def batches_of(pair: Any) -> list[Any]:
    return as_lists(list(pair[0]))


class Numbers(DataModule):
    """Four splits, of 10, 11, 12 and 13 samples."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        self.params = params

    def setup(self) -> None:
        self._train_dataset = self._create_dataset(Indices(10), self.params)
        self._valid_dataset = self._create_dataset(Indices(11), self.params)
        self._test_dataset = self._create_dataset(Indices(12), self.params)
        self._predict_dataset = self._create_dataset(Indices(13), self.params)


@pytest.mark.parametrize("kind", [list, tuple, lambda pairs: {"a": pairs[0]}])
def test_the_training_data_is_one(kind: Any) -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    module._train_dataset = kind([module._train_dataset])
    with pytest.raises(ArgumentTypeError, match="Numbers must have one training data set"):
        module.train_dataloader()


class Short(DataModule):
    """Assigns what it is given, without underscores."""

    def __init__(self, make: Callable[[DataModule], Any]) -> None:
        super().__init__()
        self.make = make

    def setup(self) -> None:
        for split in SPLITS:
            setattr(self, f"{split}_dataset", self.make(self))


def test_of_given_data_sets_the_training_data_alone_is_shuffled() -> None:
    sets = {split: Indices(length) for length, split in enumerate(SPLITS, 10)}
    module = DataModule.from_datasets(**sets, batch_size=4, drop_last=True)
    module.setup()
    assert module.train_dataset is sets["train"]
    # As for ranks that a trainer starts.
    module = pickle.loads(pickle.dumps(module))
    expected = Numbers({"batch_size": 4, "drop_last": True, "shuffle": True})
    expected.setup()
    assert batches_of(module.train_dataloader()) == batches_of(expected.train_dataloader())
    assert batches_of(module.valid_dataloader()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for split in ("test", "predict"):
        assert join(batches_of(getattr(module, f"{split}_dataloader")())) == list(
            range(len(sets[split]))
        )
    ordered = DataModule.from_datasets(train=Indices(4), batch_size=2, shuffle=False)
    assert batches_of(ordered.train_dataloader()) == [[0, 1], [2, 3]]
    assert ordered.valid_dataloader() is None


class Numbered(IterableDataset[int]):
    """A stream of three numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_given_data_may_be_steps_a_stream_several_by_name_and_have_a_sampler() -> None:
    several = DataModule.from_datasets(
        train=Steps(3), valid={"a": Indices(2), "b": Indices(3)}, test=Numbered(), batch_size=2
    )
    pairs = several.valid_dataloader()
    assert isinstance(pairs, dict)
    assert {name: batches_of(pair) for name, pair in pairs.items()} == {
        "a": [[0, 1]],
        "b": [[0, 1], [2]],
    }
    assert several.train_dataset.n == 3
    assert batches_of(several.test_dataloader()) == [[0, 1], [2]]
    streamed = DataModule.from_datasets(train=Numbered(), batch_size=3)
    assert batches_of(streamed.train_dataloader()) == [[0, 1, 2]]
    sampler = ResumableSequentialSampler(Indices(4), 2)
    sampled = DataModule.from_datasets(train=Indices(4), valid=Indices(3), sampler=sampler)
    assert batches_of(sampled.train_dataloader()) == [[0], [1], [2], [3]]
    assert batches_of(sampled.valid_dataloader()) == [[0], [1], [2]]


def test_what_is_no_data_set_with_options_is_an_error_where_it_is_assigned() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Write self\.train_dataset = self\.create_data"):
        Short(lambda module: Indices(3)).setup()


def add_up(samples: list[int]) -> Any:
    return torch.tensor([sum(samples)])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Indices(10), batch_size=4),
        DataLoader(Indices(10), batch_size=4, drop_last=True, collate_fn=add_up),
        DataLoader(Indices(10), batch_size=None),
        DataLoader(Indices(10), batch_size=3, num_workers=1, prefetch_factor=3),
        DataLoader(Numbered(), batch_size=2),
    ],
    ids=["batches", "collated", "single", "workers", "stream"],
)
def test_a_plain_loader_is_taken_apart_to_the_same_batches(loader: DataLoader[Any]) -> None:
    module = Short(lambda module: loader)
    module.setup()
    for found in (module, DataModule.from_datasets(train=loader, valid=loader, batch_size=7)):
        assert found.train_dataset is loader.dataset
        assert batches_of(found.train_dataloader()) == as_lists(list(loader))
        mine, _ = found.train_dataloader()
        assert mine.num_workers == loader.num_workers
        assert mine.prefetch_factor == loader.prefetch_factor


DATA = Indices(4)


@pytest.mark.parametrize(
    ("loader", "obstacle"),
    [
        (
            DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 4, 4), batch_size=2),
            "a WeightedRandomSampler of its own",
        ),
        (
            DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True), drop_last=True),
            "a RandomSampler of its own",
        ),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=2)), "a RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(Indices(3))), "a RandomSampler"),
        (DataLoader(DATA, sampler=SequentialSampler(Indices(3))), "a SequentialSampler"),
        (DataLoader(DATA, shuffle=True, generator=torch.Generator()), "a generator of its own"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)),
            "a batch_sampler of its own, a BatchSampler",
        ),
        (DataLoader(DATA, num_workers=2, in_order=False), "in_order=False"),
        (type("Own", (DataLoader,), {})(DATA), "the class Own"),
    ],
)
def test_a_loader_that_no_options_stand_for_is_an_error_that_writes_the_replacement(
    loader: DataLoader[Any], obstacle: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(f"with {obstacle}")) as caught:
        DataModule.from_datasets(train=loader)
    assert "Write self.train_dataset = self.create_dataset(dataset, " in str(caught.value)

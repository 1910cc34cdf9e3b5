"""The data module: what users assign, and what they get."""

from __future__ import annotations

from typing import Any

import pytest

from helios.data import DataLoaderParams, DataModule
from helios.data.phase_sources import open_source, open_sources
from helios.data.samplers import (
    ResumableRandomSampler,
    ResumableSequentialSampler,
)
from helios.data.source import Shard
from helios.errors import ArgumentError, ArgumentTypeError
from tests.data.datasets import FETCH, Indices, as_lists, join, walk_shares

SPLITS = ("train", "valid", "test", "predict")


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


def test_without_a_trainer_each_split_has_its_loader() -> None:
    module = Numbers({"batch_size": 5, "shuffle": True})
    module.prepare_data()
    module.setup()
    for length, split in enumerate(SPLITS, 10):
        assert len(getattr(module, f"{split}_dataset")) == length
        loader, sampler = getattr(module, f"{split}_dataloader")()
        assert isinstance(sampler, ResumableRandomSampler)
        assert sorted(join(as_lists(list(loader)))) == list(range(length))
    module.teardown()


@pytest.mark.parametrize("is_distributed", [None, False, True])
def test_data_is_shared_unless_its_options_say_otherwise(is_distributed: bool | None) -> None:
    # Whatever the module says of distribution: only the user's own word is against sharing.
    for of_module in (False, True):
        module = Numbers(DataLoaderParams(is_distributed=is_distributed))
        module.setup()
        module.is_distributed, module.num_replicas = of_module, 2
        for split, pads in (("train", True), ("valid", False)):
            pair = getattr(module, f"{split}_dataloader")()
            share = Shard(2, range(1, 2), pads)
            source = open_source(*pair, run_seed=0, purpose=FETCH, share=share)
            (first,) = walk_shares(source, 0)[0]
            assert first.tolist() == [0 if is_distributed is False and pads else 1]


class Several(Numbers):
    """Lists, tuples and dicts of data sets."""

    def setup(self) -> None:
        super().setup()
        pairs = [self._create_dataset(Indices(length), self.params) for length in (3, 4)]
        self._valid_dataset = pairs
        self._test_dataset = tuple(pairs)
        self._predict_dataset = {"near": pairs[0], "far": pairs[1]}


def test_several_data_sets_give_as_many_loaders_in_order() -> None:
    module = Several({"batch_size": 2})
    module.setup()
    for split in ("valid", "test"):
        assert list(map(len, getattr(module, f"{split}_dataset"))) == [3, 4]
        pairs = getattr(module, f"{split}_dataloader")()
        assert isinstance(pairs, list)
        assert [as_lists(list(loader)) for loader, _ in pairs] == [[[0, 1], [2]], [[0, 1], [2, 3]]]
        assert all(isinstance(sampler, ResumableSequentialSampler) for _, sampler in pairs)


def test_named_data_sets_keep_their_names() -> None:
    module = Several({"batch_size": 2})
    module.setup()
    found = {name: len(data) for name, data in module.predict_dataset.items()}
    assert found == {"near": 3, "far": 4}
    pairs = module.predict_dataloader()
    assert isinstance(pairs, dict)
    assert {name: len(loader) for name, (loader, _) in pairs.items()} == {"near": 2, "far": 2}
    assert list(pairs) == ["near", "far"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda pair: [pair, None], "validation data set 1 of Numbers must be created by"),
        (lambda pair: {"a": Indices(3)}, "validation data set 'a' of Numbers must be created by"),
    ],
)
def test_what_is_wrong_among_several_is_named(make: Any, words: str) -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    module._valid_dataset = make(module._valid_dataset)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        module.valid_dataloader()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "list of loaders of validation must contain at least one"),
        (["a/b"], "names of loaders of validation must be non-empty strings"),
        ([1], "names of loaders of validation must be non-empty strings"),
    ],
)
def test_several_loaders_have_good_names(names: list[Any], words: str) -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    pairs = dict.fromkeys(names, module._valid_dataset)
    module._valid_dataset = pairs
    with pytest.raises(ArgumentError, match=words):
        open_sources(module.valid_dataloader(), label="validation", run_seed=0, purpose="valid")


@pytest.mark.parametrize("kind", [list, tuple, lambda pairs: {"a": pairs[0]}])
def test_the_training_data_is_one(kind: Any) -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    module._train_dataset = kind([module._train_dataset])
    with pytest.raises(ArgumentTypeError, match="Numbers must have one training data set"):
        module.train_dataloader()

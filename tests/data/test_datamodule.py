"""The data module: what users assign, and what they get."""

from __future__ import annotations

from typing import Any

import pytest

from helios.data import DataLoaderParams, DataModule, DatasetSplit
from helios.data.datamodule import Dataset
from helios.data.loader import create_dataloader
from helios.data.samplers import ResumableRandomSampler, ResumableSequentialSampler
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from tests.data.datasets import Indices, as_lists, join

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


class Empty(DataModule):
    def setup(self) -> None:
        """Assign nothing."""


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
    with pytest.raises(UsageError, match=r"DataModule\.trainer is not there"):
        module.trainer  # noqa: B018 - reading it is the test


def test_a_split_without_data_is_none() -> None:
    module = Empty()
    module.setup()
    for split in SPLITS:
        assert getattr(module, f"{split}_dataset") is None
        assert getattr(module, f"{split}_dataloader")() is None


def test_each_call_gives_a_new_pair() -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    first, second = module.train_dataloader(), module.train_dataloader()
    assert first is not None
    assert second is not None
    assert first[0] is not second[0]
    assert first[1] is not second[1]


def test_options_are_copied_and_a_sampler_in_them_is_not() -> None:
    sampler = ResumableSequentialSampler(range(10))
    params = DataLoaderParams(batch_size=2, sampler=sampler)
    module = Numbers(params)
    module.setup()
    params.batch_size = 9
    pair = module.train_dataloader()
    assert pair is not None
    assert pair[1] is sampler
    assert len(pair[0]) == 5


def test_distribution_is_taken_from_the_module_unless_the_options_say() -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    assert not module.is_distributed
    module.is_distributed = True
    with pytest.raises(ArgumentError, match="must come with a process group"):
        module.train_dataloader()
    module.params = DataLoaderParams(is_distributed=False)
    module.setup()
    assert module.train_dataloader() is not None


def test_the_pair_gives_the_arguments_of_a_loader() -> None:
    pair = Dataset(Indices(4), DataLoaderParams(batch_size=3))
    loader, _ = create_dataloader(**pair.dict())
    assert as_lists(list(loader)) == [[0, 1, 2], [3]]


def test_options_are_checked_when_the_data_set_is_made() -> None:
    with pytest.raises(ArgumentError, match="batch_size"):
        Numbers({"batch_size": 0}).setup()
    with pytest.raises(ArgumentTypeError, match="must be a DataLoaderParams or a dict, got 7"):
        Numbers(7).setup()


def test_messages_name_the_split() -> None:
    module = Numbers(DataLoaderParams())
    module.setup()
    module._valid_dataset = module._create_dataset(Indices(0), {})
    with pytest.raises(ArgumentError, match="The validation data set must hold at least one"):
        module.valid_dataloader()
    module._test_dataset = Indices(3)  # type: ignore[assignment]
    with pytest.raises(ArgumentTypeError, match="test data set of Numbers must be made by"):
        module.test_dataloader()


def test_splits_have_labels() -> None:
    labels = ["train", "valid", "test"]
    assert [DatasetSplit.from_str(label) for label in labels] == list(DatasetSplit)
    with pytest.raises(ValueError, match='must be "train", "valid" or "test", got \'dev\''):
        DatasetSplit.from_str("dev")


def test_a_module_must_say_what_its_data_is() -> None:
    with pytest.raises(TypeError, match="abstract"):
        DataModule()

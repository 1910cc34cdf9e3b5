"""What a data set is: its class through wrappers, its length, its own fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from helios.data.fingerprint import count_samples, describe_class, find_fingerprint


class Plain:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


class Cached(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 4


class Marked(Plain):
    def __init__(self, fingerprint: Any) -> None:
        self.fingerprint = fingerprint


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def test_a_class_is_named_through_its_wrappers() -> None:
    tensors = TensorDataset(torch.zeros(2))
    assert describe_class(Plain()) == "Plain"
    assert describe_class(Subset(Plain(), [0])) == "Subset(Plain)"
    assert describe_class(Cached(Subset(tensors, [0]))) == "Cached(Subset(TensorDataset))"
    assert describe_class(ConcatDataset([tensors, tensors, Cached(tensors)])) == (
        "ConcatDataset(TensorDataset, Cached(TensorDataset))"
    )


def test_samples_are_counted_where_the_data_set_says_how_many() -> None:
    assert count_samples(Plain()) == 3
    assert count_samples([1, 2]) == 2
    assert count_samples(Stream()) is None
    assert count_samples(Subset(Plain(), [0])) == 1
    assert count_samples(Cached(None)) == 4
    assert count_samples(object()) is None


def test_a_fingerprint_is_a_string_that_the_data_set_or_what_it_wraps_offers() -> None:
    assert find_fingerprint(Marked("abc")) == "abc"
    assert find_fingerprint(Subset(Marked("abc"), [0])) == "abc"
    assert find_fingerprint(ConcatDataset([Marked("a"), Marked("b")])) == "a b"
    assert find_fingerprint(Marked(lambda: "abc")) is None
    assert find_fingerprint(Plain()) is None

"""Small data sets that show what was fetched, and how to walk through a source."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from helios.core import rng
from helios.data.source import BatchIterator, Source

FETCH = "fetch"


def draw() -> list[float]:
    """Draw one number from each generator that a data set may use."""
    numpy_number = float(rng.get_default_numpy_rng().generator.random())
    return [float(torch.rand(())), random.random(), numpy_number]


class Indices(Dataset):
    """Samples that are their own index; counts the fetches of each, in workers too."""

    def __init__(self, length: int) -> None:
        self.counts = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> int:
        self.counts[index] += 1
        return int(index)


class Augmented(Indices):
    """Samples that carry their index and numbers of all generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([super().__getitem__(index), *draw()], dtype=torch.float64)


def collate_noisily(samples: list[Any]) -> torch.Tensor:
    """Append numbers that are drawn once a batch; sums depend on the number of threads."""
    batch = default_collate(samples)
    noise = torch.tensor(draw(), dtype=torch.float64).expand(len(batch), 3)
    return torch.cat([batch, noise], dim=1)


class Lone(Iterator[Any]):
    """A pass of one replica, without the list around each of its batches."""

    def __init__(self, batches: BatchIterator) -> None:
        self.inner = batches

    def __next__(self) -> Any:
        (batch,) = next(self.inner)
        return batch

    @property
    def is_last(self) -> bool:
        return self.inner.is_last

    @property
    def num_samples(self) -> int:
        return self.inner.num_samples

    def close(self) -> None:
        self.inner.close()


def walk(source: Source, epoch: int, **where: int | None) -> list[Any]:
    """Return the batches of one replica, as :func:`walk_shares` does."""
    return [batch for (batch,) in walk_shares(source, epoch, **where)]


def walk_shares(
    source: Source, epoch: int, *, batch: int = 0, sample: int = 0, limit: int | None = None
) -> list[Any]:
    """Return what the iterations of a pass give from a place on, at most ``limit``."""
    found = []
    batches = source.batches(epoch, batch=batch, sample=sample)
    try:
        for item in batches:
            found.append(item)
            if len(found) == limit:
                break
    finally:
        batches.close()
    return found


def join(lists: Iterable[list[Any]]) -> list[Any]:
    """Return the items of all lists in one."""
    return list(chain.from_iterable(lists))


def as_lists(batches: list[Any]) -> list[list[int]]:
    """Return batches of indices as plain lists."""
    return [torch.as_tensor(batch).tolist() for batch in batches]

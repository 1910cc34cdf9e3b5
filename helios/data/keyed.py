"""Sends a key with the indices of each batch, from which the fetching process is seeded.

So the random numbers of a batch depend on its position, not on the process that fetches it. The
data set seeds all generators from the key before the fetch. The collate function runs in the same
process right afterwards, so it draws from the same stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, final, runtime_checkable

from torch.utils.data import DataLoader, Dataset, Sampler

from helios.core import rng
from helios.data.order import Order, Position
from helios.data.workers import Parcel
from helios.storage.content_hash import Content, read_safely

_Found = TypeVar("_Found")


class Keyed(NamedTuple):
    """What is sent to the process that fetches a batch.

    Attributes:
        key: the key to seed from.
        indices: the indices of a batch; a single index if batches are not collated.
        reads_content: whether the content of the batch is read in the process that fetches it.
    """

    key: int
    indices: Any
    reads_content: bool = False


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that fetches all samples of a batch at once."""

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the samples of a batch."""
        ...


@final
class KeyedDataset(Dataset[Any]):
    """A user's data set, seeded before each fetch.

    Args:
        dataset: the user's data set; also available as an attribute.

    Attributes:
        dataset: as given.
        reads_content: whether the content of the batch that was fetched last is read by its worker.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._getitems = dataset.__getitems__ if isinstance(dataset, BatchedDataset) else None
        self.reads_content = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Keyed):
            return self.dataset[index]
        self.reads_content = index.reads_content
        rng.reseed(index.key)
        return self.dataset[index.indices]

    def __getitems__(self, indices: Any) -> Any:
        if isinstance(indices, Keyed):
            self.reads_content = indices.reads_content
            rng.reseed(indices.key)
            indices = indices.indices
        if self._getitems is not None:
            return self._getitems(indices)
        return [self.dataset[index] for index in indices]


class ReadBatch(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: the batch.
        content: what was read of it.
    """

    batch: Any
    content: Content


@final
class ReadingCollate:
    """Collates a batch in a worker, and reads its content if the key of the batch demands it.

    Args:
        collate: the user's function.
        dataset: the data set of the same worker, which gets the keys.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: KeyedDataset) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """Return the batch, with its content if demanded."""
        batch = self._collate(samples)
        if not self._dataset.reads_content:
            return Parcel(batch)
        return Parcel(ReadBatch(batch, read_safely(batch)))


def data_sets_of(loader: object) -> list[Any]:
    """Return the data set that a loader of PyTorch reads, and the user's own one inside of it."""
    if not isinstance(loader, DataLoader):
        return []
    outer = loader.dataset
    return [outer, outer.dataset] if isinstance(outer, KeyedDataset) else [outer]


Walk: TypeAlias = Callable[[], Iterator[Keyed]]


@final
class KeyedBatchSampler(Sampler[Keyed]):
    """The batches of a pass, each with its key, for a run or for a user's own loop.

    Args:
        order: the order of the samples.
        batch_size: samples per batch; ``None`` to fetch single samples.
        drop_last: whether to drop an incomplete last batch.
    """

    def __init__(
        self, order: Order, *, batch_size: int | None = 1, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.order = order
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._walk: Walk | None = None
        self._last_by_hand: Position | None = None

    @property
    def is_batched(self) -> bool:
        """Whether an item is a list of indices."""
        return self.order.yields_batches or self._batch_size is not None

    def seek(self, walk: Walk | None) -> None:
        """Set the function that iterates over the next pass; ``None`` for the user's sampler."""
        self._walk = walk

    @property
    def num_batches(self) -> int | None:
        """The number of batches of a whole pass; ``None`` if unknown."""
        length = self.order.length
        if length is None or self.order.yields_batches:
            return length
        size = self._batch_size or 1
        return length // size if self._drop_last else -(-length // size)

    def __len__(self) -> int:
        count = self.num_batches
        if count is None:
            raise TypeError(f"{type(self.order.sampler).__name__} has no length.")
        return count

    def __iter__(self) -> Iterator[Keyed]:
        # The function is chosen now, and called at the first step: torch calls iter() twice when it
        # starts workers, and only uses the second iterator.
        return self._walk_by_hand() if self._walk is None else self._walk()

    def _walk_by_hand(self) -> Iterator[Keyed]:
        position = self._place_by_hand()
        keys = position.fetch_keys()
        for batch, indices in enumerate(self._lists(position), position.batch):
            yield Keyed(keys.at(batch), indices)

    def _lists(self, position: Position) -> Iterator[Any]:
        """Iterate over the lists of indices of a pass, or over single indices, without keys."""
        blocks = self.order.blocks(position)
        if self.order.yields_batches or self._batch_size is None:
            return chain.from_iterable(blocks)
        lists = chain.from_iterable(split_into_batches(blocks, self._batch_size))
        least = self._batch_size if self._drop_last else 1
        return (indices for indices in lists if len(indices) >= least)

    def _place_by_hand(self) -> Position:
        """Return the position of a user's own loop; a repeated epoch gets new random streams.

        Otherwise, a loop that never calls ``set_epoch`` would repeat its augmentation.
        """
        position, last = self.order.place_by_hand(self._batch_size or 1), self._last_by_hand
        if last is not None and last.epoch == position.epoch:
            position = dataclasses.replace(position, repeat=last.repeat + 1)
        self._last_by_hand = position
        return position


def ask_twice(position: Position, ask: Callable[[], _Found | None]) -> _Found | None:
    """Return the result of iterating over a copy of a user's sampler, if it is the same twice.

    The result differs if the order depends on more than the position, such as a counter of the
    sampler. Nothing but the copy is changed.

    Args:
        position: determines the random stream of the sampler.
        ask: iterates over the copy from the position.
    """
    try:
        with rng.stream(position.order_key()):
            first, second = ask(), ask()
    except Exception:  # a copy of a user's sampler may be incomplete
        return None
    return first if first == second else None


def split_into_batches(blocks: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    """Split blocks into lists of equal size, several at once; the last one may be shorter."""
    rest: list[Any] = []
    for block in blocks:
        joined = rest + block if rest else block
        end = len(joined) - len(joined) % size
        if end:
            yield [joined[first : first + size] for first in range(0, end, size)]
        rest = joined[end:]
    if rest:
        yield [rest]

"""Iterates over a ``KeyedLoader``; each iteration returns a batch per replica of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, get_num_threads
from torch.utils.data._utils.pin_memory import pin_memory as pin

from helios.core import rng
from helios.core.equality import same
from helios.data.interfaces import BatchIterator, make_cut_error, run_on_one_thread
from helios.data.keyed import BatchedDataset
from helios.data.loader import KeyedLoader
from helios.data.order import Position
from helios.data.shard import NO_BATCH
from helios.data.sharding_plan import ReplicaIndices, ShardedIteration, ShardingPlan
from helios.storage.content_hash import look_safely

_INT = frozenset((int,))


def begin_pass(
    loader: KeyedLoader,
    deal: ShardingPlan,
    position: Position,
    *,
    reads_content: bool,
) -> BatchIterator:
    """Start a pass; each iteration returns a list with an entry per replica of the process."""
    kind = _WorkerBatches if loader.num_workers else _LocalBatches
    return kind(loader, deal, position, reads_content=reads_content)


def _make_fetch(loader: KeyedLoader) -> Callable[[Any], Any]:
    """Return a function that fetches and collates a batch in this process, without seeding."""
    dataset, collate = loader.keyed_dataset.dataset, loader.collate_fn
    if not loader.batches.is_batched:
        return lambda index: collate(dataset[index])
    if isinstance(dataset, BatchedDataset):
        # A copy, because the data set may change the list.
        return lambda indices: collate(dataset.__getitems__([*indices]))

    def fetch(indices: list[Any]) -> Any:
        # Not map(), which would end early if the data set raised StopIteration.
        samples = []
        for index in indices:
            samples.append(dataset[index])
        return collate(samples)

    return _RowFetch(dataset.tensors, fetch) if loader.is_pure else fetch


@final
class _RowFetch:
    """Fetches the rows of tensors by one operation for each tensor, not one for each sample.

    The first batch is fetched in both ways: ``default_collate`` has a table in which scripts may
    change what it does. Where the results differ, all batches are fetched by sample.

    Args:
        tensors: those of the data set.
        fetch: fetches a batch by sample.
    """

    def __init__(self, tensors: Sequence[Tensor], fetch: Callable[[list[Any]], Any]) -> None:
        self._tensors = tensors
        self._fetch = fetch
        self._is_known = False
        self._is_equal = all(each.is_cpu and not each.requires_grad for each in tensors)

    def __call__(self, indices: list[Any]) -> Any:
        # A list of anything but numbers would mean something else to a tensor.
        if not self._is_equal or not _INT.issuperset(map(type, indices)):
            return self._fetch(indices)
        rows, found = torch.tensor(indices), []
        for tensor in self._tensors:
            found.append(tensor[rows])
        if self._is_known:
            return found
        batch = self._fetch(indices)
        self._is_known = True
        self._is_equal = _are_alike(batch, found)
        return batch


def _are_alike(batch: Any, rows: list[Tensor]) -> bool:
    """Whether a batch is the same list of tensors, in the same order in memory."""
    return (
        type(batch) is list
        and all(type(each) is Tensor for each in batch)
        and same(batch, rows)
        and all(one.stride() == other.stride() for one, other in zip(batch, rows, strict=True))
    )


class _DealtBatches(BatchIterator):
    """The position in a pass."""

    def __init__(self, deal: ShardingPlan, position: Position) -> None:
        self._deal = deal
        self._position = position
        self._batch = position.batch
        self._sample = position.sample
        self._is_done = False
        self._is_closed = False

    @property
    def sizes(self) -> Sequence[int] | None:
        """The samples of each batch."""
        return None if self.indices is None else self._deal.count_samples(self.indices)

    def _fill(self, found: list[Any]) -> list[Any]:
        """Append ``NO_BATCH`` for replicas without a batch, which are the last of the block."""
        return found + [NO_BATCH] * (len(self._deal.share.block) - len(found))

    def close(self) -> None:
        """End the pass."""
        if not self._is_done and not self._is_closed:
            self._deal.leave(replace(self._position, batch=self._batch, sample=self._sample))
        self._is_closed = True


@final
class _LocalBatches(_DealtBatches):
    """A pass that the training process fetches, without PyTorch's iterator (10 µs faster)."""

    def __init__(
        self,
        loader: KeyedLoader,
        deal: ShardingPlan,
        position: Position,
        *,
        reads_content: bool,
    ) -> None:
        super().__init__(deal, position)
        self._reads_content = reads_content
        self._fetch = _make_fetch(loader)
        self._is_pure = loader.is_pure
        self._is_pinned = loader.pin_memory
        self._keys = [
            replace(position, replica=replica).fetch_keys() for replica in deal.share.block
        ]
        self._turns: Iterator[ReplicaIndices] = deal.turns(position)
        self._following = next(self._turns, None)
        self._is_done = self._following is None

    def __next__(self) -> Any:
        turn = self._following
        if turn is None or self._is_closed:
            self.close()
            raise StopIteration
        hands, self.num_samples, self.skipped, self.repeats = turn
        self.indices = hands
        self._following = following = next(self._turns, None)
        self.is_last = self._is_done = following is None
        # Written out in both kinds of batches: a method would be a call more for each batch.
        number = self._batch + self.skipped[0]
        self._batch = number + 1
        self._sample += self.skipped[1] + self.num_samples
        found = []
        try:
            for keys, indices in zip(self._keys, hands, strict=False):
                if not self._is_pure:
                    rng.reseed(keys.at(number))
                if get_num_threads() == 1:
                    found.append(self._fetch(indices))
                else:
                    found.append(run_on_one_thread(self._fetch, indices))
        except StopIteration as error:
            raise make_cut_error(number) from error
        if self._reads_content:
            self.contents = [*map(look_safely, found)]
        if self._is_pinned:
            found = [*map(pin, found)]
        return found if len(found) == len(self._keys) else self._fill(found)


@final
class _WorkerBatches(_DealtBatches):
    """A pass that PyTorch's workers prefetch."""

    def __init__(
        self,
        loader: KeyedLoader,
        deal: ShardingPlan,
        position: Position,
        *,
        reads_content: bool,
    ) -> None:
        super().__init__(deal, position)
        self._reads_content = reads_content
        self._lives_on = loader.persistent_workers
        self._under_way: deque[ShardedIteration] = deque()
        walk = deal.walk(position, self._under_way, reads_content=reads_content)
        self._batches = loader.start(position, walk)
        # PyTorch reads ahead by at least one batch, so an empty list always means the end.
        self._is_done = not self._under_way

    def __next__(self) -> Any:
        if self._is_closed or not self._under_way:
            self.close()
            raise StopIteration
        turn, is_last = self._under_way.popleft()
        self.indices, self.num_samples, self.skipped, self.repeats = turn
        try:
            found = [next(self._batches) for _ in self.indices]
        except StopIteration as error:
            raise make_cut_error(self._batch + self.skipped[0]) from error
        if self._reads_content:
            self.contents = [each.content for each in found]
            found = [each.batch for each in found]
        self.is_last = self._is_done = is_last
        self._batch += self.skipped[0] + 1
        self._sample += self.skipped[1] + self.num_samples
        return self._fill(found)

    def close(self) -> None:
        """End the pass and workers that are not persistent."""
        if not self._is_closed:
            self._batches.close(keeps_workers=self._lives_on)
        super().close()

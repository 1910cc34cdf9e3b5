"""The data of a ``KeyedLoader``, exact from any position: batches are seeded before their fetch.

Each iteration returns a batch for each replica of the process.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, get_num_threads

from helios.core import rng
from helios.core.memory import same
from helios.data.fingerprint import describe_class, find_fingerprint, length_of
from helios.data.loader import BatchedDataset, Keyed, KeyedLoader
from helios.data.mixture import Mixture
from helios.data.order import Position
from helios.data.sharding_plan import (
    ReplicaIndices,
    ShardedIteration,
    ShardingPlan,
    make_sharding_plan,
)
from helios.data.source import (
    NO_BATCH,
    BatchIterator,
    ByPosition,
    Shard,
    Source,
    make_cut_error,
    pin,
    run_on_one_thread,
)
from helios.data.workers import end_workers
from helios.storage.content_hash import Content, read_sums

_INT = frozenset((int,))


@final
class KeyedSource(Source):
    """The data of a ``KeyedLoader``, exact from any position.

    Args:
        loader: the loader.
        begin: has the seed of the run, and the name of the random streams of fetching.
        share: the part of this process.
    """

    loader: KeyedLoader
    num_alone = 16

    def __init__(self, loader: KeyedLoader, begin: Position, share: Shard) -> None:
        super().__init__()
        self.loader = loader
        self._begin = begin
        self._deal = make_sharding_plan(loader, share)
        self._deal.skipped = self._skipped
        self.resumes_by = ByPosition(is_split_by_rank=self._deal.is_own)
        self._pass_length: int | None = None
        params, dataset, deal = loader.params, loader.keyed_dataset.dataset, self._deal
        is_listed = params.batch_sampler is not None
        is_shared = share.num_replicas > 1
        shared = {"is_distributed": deal.is_split or deal.is_own} if is_shared else {}
        mixed = {"mixture": dataset.describe()} if isinstance(dataset, Mixture) else {}
        # As of now: a data set may grow.
        self._description: dict[str, Any] = {
            **shared,
            **mixed,
            "length": length_of(dataset),
            "batch_size": None if is_listed else params.batch_size,
            "shuffle": params.shuffle,
            "drop_last": params.drop_last,
            "seed": params.random_seed,
            "sampler": type(loader.batches.order.sampler).__qualname__,
            "dataset": describe_class(dataset),
            "fingerprint": find_fingerprint(dataset),
            "num_workers": params.num_workers,
        }

    def _describe(self) -> dict[str, Any]:
        return self._description

    @property
    def length(self) -> int | None:
        """The current number of samples; ``None`` if the data set has no length."""
        return length_of(self.loader.keyed_dataset.dataset)

    @property
    def pass_length(self) -> int | None:
        """The value of :attr:`length` when the last pass started."""
        return self._pass_length

    @property
    def ends_together(self) -> bool:
        """True, unless a user's sampler splits the data by rank, for which it is unknown."""
        return not self._deal.is_own

    @property
    def state_is_per_process(self) -> bool:
        """Whether a user's sampler that splits the data by rank has a state."""
        return self._deal.is_own and self.loader.batches.order.has_state

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        position = self._place(epoch, batch, sample)
        self._pass_length = self.length
        if self.loader.num_workers:
            loader = self.loader.alone() if self.has_lost else self.loader
            return _WorkerBatches(loader, self._deal, position, reads_content)
        return _LocalBatches(self.loader, self._deal, position, reads_content=reads_content)

    def _count_batches(self, batch: int, sample: int) -> int | None:
        return self._deal.num_batches(batch=batch, sample=sample)

    def _find_indices(self, epoch: int, batch: int, sample: int) -> list[Any] | None:
        """Compute the indices; unknown if a user's sampler has a state or splits the data."""
        position = self._place(epoch, batch, sample)
        hands = self._deal.hands_at(position, self.loader.keyed_dataset.dataset)
        return hands if hands is None or self._deal.is_flat else [*chain.from_iterable(hands)]

    def fetch_again(
        self, epoch: int, batch: int, times: int = 1
    ) -> list[tuple[list[Any], list[Content]]] | None:
        """Fetch the batches of one iteration; not if a user's sampler has a state or splits."""
        position = self._place(epoch, batch, self._deal.first_sample(batch))
        hands = self._deal.hands_at(position, self.loader.keyed_dataset.dataset)
        if hands is None:
            return None
        block = self._deal.share.block
        own = hands[block.start : block.stop]
        keys = [replace(position, replica=replica).fetch_keys().at(batch) for replica in block]
        # Copies, because the data set may change a list.
        items = [
            Keyed(key, copy.copy(indices), reads_content=True)
            for _ in range(times)
            for key, indices in zip(keys, own, strict=False)
        ]
        with rng.stream(keys[0]):
            contents = self.loader.read_again(position, items)
        size = len(own)
        return [(own, contents[n * size : (n + 1) * size]) for n in range(times)]

    @property
    def _can_skip(self) -> bool:
        return not self._deal.is_own

    def _place(self, epoch: int, batch: int, sample: int) -> Position:
        return replace(self._begin, epoch=epoch, batch=batch, sample=sample)

    def state_dict(self) -> dict[str, Any]:
        """Return a user's sampler's state at the start of the epoch; empty if it has none."""
        return self.loader.batches.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a user's sampler."""
        self.loader.batches.order.load_state_dict(state_dict)

    def close(self) -> None:
        """End persistent workers."""
        end_workers(self.loader)


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
        # An array of NumPy's in between takes a third of the time.
        rows, found = torch.from_numpy(np.array(indices)), []
        try:
            for tensor in self._tensors:
                found.append(tensor.index_select(0, rows))
        except (IndexError, RuntimeError):  # of a negative index, as well as of a wrong one
            return self._fetch(indices)
        if self._is_known:
            return found
        batch = self._fetch(indices)
        self._is_known = True
        self._is_equal = _are_alike(batch, found)
        return batch


def _are_alike(batch: Any, rows: list[Tensor]) -> bool:
    """Return whether a batch is the same list of tensors, in the same order in memory."""
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

    def size(self, place: int) -> int | None:
        """Return the samples of a batch."""
        if self.indices is None:
            return None
        return 1 if self._deal.is_flat else len(self.indices[place])

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
            self.contents = [*map(read_sums, found)]
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
        reads_content: bool,
    ) -> None:
        super().__init__(deal, position)
        self._reads_content = reads_content
        self._under_way: deque[ShardedIteration] = deque()
        self._errors: list[Exception] = []
        items = deal.walk(position, self._under_way, reads_content=reads_content)
        # Not this object: its workers end when it is dropped, so nothing may lead back to it.
        walk = _walk(items, self._errors)
        self._batches = loader.start_workers(lambda: walk, position)
        # PyTorch reads ahead by at least one batch, so an empty list always means the end.
        self._is_done = not self._under_way

    def __next__(self) -> Any:
        if self._is_closed or not self._under_way:
            self.close()
            raise self._errors.pop() if self._errors else StopIteration
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
            self._batches.close()
        super().close()


def _walk(items: Iterator[Keyed], errors: list[Exception]) -> Iterator[Keyed]:
    """Go over the items up to an error, and keep it.

    It is not raised here: PyTorch's iterator would be left to the garbage collector, which closes
    the pipes of its queues before their threads do so once more.
    """
    try:
        yield from items
    except Exception as error:
        errors.append(error)

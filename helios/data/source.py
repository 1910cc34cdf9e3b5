"""The data of a run: batches from any place of any epoch, and what is needed to resume.

A loader of ours computes a batch from its place and seeds before it fetches (DESIGN R1, R2); a
foreign one (:mod:`helios.data.foreign`) goes on where it says it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, final

from helios.core import rng
from helios.data.deal import Deal, make_deal
from helios.data.foreign import ForeignSource
from helios.data.identity import count_samples, describe_class, find_fingerprint
from helios.data.keyed import KeyedBatchSampler
from helios.data.legacy import LegacyWatch
from helios.data.loader import KeyedLoader, end_workers
from helios.data.order import Place
from helios.data.passes import BatchIterator, Source, make_cut_error, run_on_one_thread
from helios.data.share import Share
from helios.data.shared import open_shared

__all__ = ["BatchIterator", "KeyedSource", "Source", "open_source"]

_END = object()


def open_source(
    loader: Iterable[Any],
    sampler: object = None,
    *,
    run_seed: int,
    purpose: str,
    share: Share | None = None,
) -> Source:
    """Return the source over a loader.

    Args:
        loader: what a data module returned as loader.
        sampler: what it returned beside it.
        run_seed: seed of the run.
        purpose: name of the fetching streams: ``"fetch"`` for training, another one for each
            other phase, so that evaluation shares no randomness with training.
        share: the part of this process, where replicas share the data.

    Raises:
        ArgumentError: for a loader or sampler that cannot be shared as the run is.
    """
    if isinstance(loader, KeyedLoader):
        return KeyedSource(loader, run_seed, purpose, share)
    return ForeignSource(loader, sampler, run_seed=run_seed, purpose=purpose, share=share)


@final
class KeyedSource(Source):
    """The data of a loader of ours; exact from any place.

    Args:
        loader: the loader.
        run_seed: seed of the run.
        purpose: name of the fetching streams.
        share: the part of this process, where replicas share the data.
    """

    loader: KeyedLoader

    def __init__(
        self, loader: KeyedLoader, run_seed: int, purpose: str, share: Share | None = None
    ) -> None:
        self.loader = loader
        self._run_seed = run_seed
        self._purpose = purpose
        self._watch = LegacyWatch(purpose, loader.flag)
        self._deal = None if share is None else make_deal(loader, share)
        self._description = _describe(loader, self._deal)
        self._pass_length: int | None = None

    @property
    def description(self) -> dict[str, Any]:
        """What the data is, in plain values."""
        return dict(self._description)

    @property
    def length(self) -> int | None:
        """The samples that the data set has now; ``None`` where it does not say."""
        return count_samples(self.loader.keyed_dataset.dataset)

    @property
    def pass_length(self) -> int | None:
        """What the length was when the last pass began."""
        return self._pass_length

    @property
    def can_resume(self) -> bool:
        """Always."""
        return True

    @property
    def level(self) -> str:
        """``"exact"``; ``"restart"`` where a user's sampler splits the data by rank."""
        return "restart" if self._is_own else "exact"

    @property
    def ends_together(self) -> bool:
        """Whether it does; nobody knows of a user's sampler that splits the data by rank."""
        return not self._is_own

    @property
    def state_is_per_process(self) -> bool:
        """Whether a user's sampler that splits the data by rank has a state."""
        return self._is_own and self.loader.batches.order.has_state

    @property
    def _is_own(self) -> bool:
        return self._deal is not None and self._deal.is_own

    def batches(self, epoch: int, *, batch: int = 0, sample: int = 0) -> BatchIterator:
        """Begin a pass; nothing before its place is fetched."""
        place = Place(self._run_seed, self._purpose, epoch, batch, sample)
        self._pass_length = self.length
        self._watch.begin()
        if self._deal is not None:
            return open_shared(self.loader, self._deal, place, self._watch)
        if self.loader.num_workers:
            return _WorkerBatches(self.loader, place, self._watch)
        return _LocalBatches(self.loader, place, self._watch)

    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the batches of a whole pass that goes on at a place."""
        return self._teller.num_batches(batch=batch, sample=sample)

    def indices(self, epoch: int, *, batch: int = 0, sample: int = 0) -> list[Any] | None:
        """Return the indices of one batch's samples, computed anew: nothing is fetched or moved.

        Where replicas share the data: those of all V replicas, replica by replica. ``None`` where
        a user's sampler has a state or splits the data by rank, and where there is no such batch.
        """
        place = Place(self._run_seed, self._purpose, epoch, batch, sample)
        return self._teller.indices_at(place, self.loader.keyed_dataset.dataset)

    @property
    def _teller(self) -> Deal | KeyedBatchSampler:
        return self.loader.batches if self._deal is None else self._deal

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a user's sampler had when the epoch began; empty without one."""
        return self.loader.batches.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give a user's sampler its state back."""
        self.loader.batches.order.load_state_dict(state_dict)

    def close(self) -> None:
        """End persistent workers."""
        self.loader.end_workers()


def _describe(loader: KeyedLoader, deal: Deal | None) -> dict[str, Any]:
    params, sampler = loader.params, loader.batches.order.sampler
    dataset = loader.keyed_dataset.dataset
    is_listed = params.batch_sampler is not None
    shared = {} if deal is None else {"is_distributed": deal.is_split or deal.is_own}
    return shared | {
        "length": count_samples(dataset),
        "batch_size": None if is_listed else params.batch_size,
        "shuffle": params.shuffle,
        "drop_last": params.drop_last,
        "seed": params.random_seed,
        "sampler": type(sampler).__qualname__,
        "dataset": describe_class(dataset),
        "fingerprint": find_fingerprint(dataset),
        "num_workers": params.num_workers,
    }


@final
class _LocalBatches(BatchIterator):
    """A pass that is fetched in the training process, without PyTorch's iterator (10 µs less)."""

    def __init__(self, loader: KeyedLoader, place: Place, watch: LegacyWatch) -> None:
        self._is_batched = loader.batches.is_batched
        self._fetch = loader.make_fetch()
        self._keys = place.fetch_keys()
        self._place = place
        self._batch = place.batch
        self._sample = place.sample
        self._watch: LegacyWatch | None = watch
        self._order = loader.batches.order
        self._lists = loader.batches.lists(place)
        self._following = next(self._lists, _END)

    def __next__(self) -> Any:
        indices: Any = self._following
        if indices is _END:
            self.close()
            raise StopIteration
        self._following = following = next(self._lists, _END)
        self.is_last = following is _END
        self.num_samples = len(indices) if self._is_batched else 1
        rng.reseed(self._keys.at(self._batch))
        self._batch += 1
        self._sample += self.num_samples
        try:
            return run_on_one_thread(self._fetch, indices)
        except StopIteration as error:
            raise make_cut_error(self._batch - 1) from error

    def close(self) -> None:
        """End the pass."""
        if self._watch is None:
            return
        if self._following is not _END:
            self._order.leave(replace(self._place, batch=self._batch, sample=self._sample))
        self._following, self._lists = _END, iter(())
        self._watch.end()
        self._watch = None


@final
class _WorkerBatches(BatchIterator):
    """A pass that PyTorch's workers fetch ahead."""

    def __init__(self, loader: KeyedLoader, place: Place, watch: LegacyWatch) -> None:
        self._place = place
        self._batch = place.batch
        self._sample = place.sample
        self._order = loader.batches.order
        self._ledger = loader.batches.ledger
        self._lives_on = loader.persistent_workers
        self._watch: LegacyWatch | None = watch
        self._batches: Iterator[Any] = iter(())
        self._batches = loader.start(place)

    def __next__(self) -> Any:
        if self._watch is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration as error:
            if self._ledger:
                raise make_cut_error(self._batch) from error
            self.is_last = True
            self.close()
            raise
        self._batch += 1
        self.num_samples, self.is_last = self._ledger.popleft()
        self._sample += self.num_samples
        return batch

    def close(self) -> None:
        """End the pass; workers that are not persistent end with it."""
        if self._watch is None:
            return
        if not self._lives_on:
            end_workers(self._batches)
        if not self.is_last:
            self._order.leave(replace(self._place, batch=self._batch, sample=self._sample))
        self._watch.end()
        self._watch = None

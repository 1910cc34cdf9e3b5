"""The sources of a run's data, which return batches from any position of any epoch.

A :class:`KeyedSource` computes a batch from its position and seeds before it fetches. A custom
loader (:mod:`helios.data.external_loader`) resumes from its own state, if it has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from helios.data.external_loader import ExternalSource
from helios.data.fetching import begin_pass
from helios.data.fingerprint import count_samples, describe_class, find_fingerprint
from helios.data.interfaces import BatchIterator, ByPosition, Source
from helios.data.loader import KeyedLoader
from helios.data.mixture import Mixture
from helios.data.order import Position
from helios.data.shard import LONE, Shard
from helios.data.sharding_plan import ShardingPlan, make_sharding_plan
from helios.data.steps import Steps, StepsSource
from helios.data.stream_reading import StreamLoader
from helios.data.stream_source import StreamSource

__all__ = ["BatchIterator", "KeyedSource", "Source", "open_source"]


def open_source(
    loader: Iterable[Any],
    sampler: object = None,
    *,
    run_seed: int,
    fetch_seed: int | None = None,
    purpose: str,
    share: Shard = LONE,
) -> Source:
    """Return the source for a loader.

    Args:
        loader: the loader that a data module returned.
        sampler: the sampler that it returned with the loader.
        run_seed: seed of the order.
        fetch_seed: seed of what is drawn by a fetch; ``None`` for that of the order.
        purpose: name of the random streams of fetching: ``"fetch"`` for training, another one for
            each other phase, so that evaluation and training use different random numbers.
        share: the part of this process.

    Raises:
        ArgumentError: if the replicas of the run cannot share the loader or sampler.
    """
    if isinstance(loader, Steps):
        return StepsSource(loader, share)
    if isinstance(loader, StreamLoader):
        return StreamSource(loader, run_seed, purpose, share, fetch_seed=fetch_seed)
    if isinstance(loader, KeyedLoader):
        return KeyedSource(loader, run_seed, purpose, share, fetch_seed=fetch_seed)
    return ExternalSource(
        loader, sampler, run_seed=run_seed, fetch_seed=fetch_seed, purpose=purpose, share=share
    )


@final
class KeyedSource(Source):
    """The data of a ``KeyedLoader``, exact from any position.

    Args:
        loader: the loader.
        run_seed: seed of the order.
        purpose: name of the random streams of fetching.
        share: the part of this process.
        fetch_seed: seed of what is drawn by a fetch; ``None`` for that of the order.
    """

    loader: KeyedLoader

    def __init__(
        self,
        loader: KeyedLoader,
        run_seed: int,
        purpose: str,
        share: Shard = LONE,
        *,
        fetch_seed: int | None = None,
    ) -> None:
        super().__init__()
        self.loader = loader
        self._run_seed = run_seed
        self._fetch_seed = fetch_seed
        self._purpose = purpose
        self._deal = make_sharding_plan(loader, share)
        self._deal.skipped = self._skipped
        self.resumes_by = ByPosition(is_split_by_rank=self._deal.is_own)
        self._description = _describe(loader, self._deal)
        self._pass_length: int | None = None

    def _describe(self) -> dict[str, Any]:
        return self._description

    @property
    def length(self) -> int | None:
        """The current number of samples; ``None`` if the data set has no length."""
        return count_samples(self.loader.keyed_dataset.dataset)

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
        return begin_pass(self.loader, self._deal, position, reads_content=reads_content)

    def _count_batches(self, batch: int, sample: int) -> int | None:
        return self._deal.num_batches(batch=batch, sample=sample)

    def _find_indices(self, epoch: int, batch: int, sample: int) -> list[Any] | None:
        """Compute the indices; unknown if a user's sampler has a state or splits the data."""
        position = self._place(epoch, batch, sample)
        return self._deal.indices_at(position, self.loader.keyed_dataset.dataset)

    @property
    def _can_skip(self) -> bool:
        return not self._deal.is_own

    def _place(self, epoch: int, batch: int, sample: int) -> Position:
        return Position(
            run_seed=self._run_seed,
            purpose=self._purpose,
            epoch=epoch,
            batch=batch,
            sample=sample,
            fetch_seed=self._fetch_seed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a user's sampler's state at the start of the epoch; empty if it has none."""
        return self.loader.batches.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a user's sampler."""
        self.loader.batches.order.load_state_dict(state_dict)

    def close(self) -> None:
        """End persistent workers."""
        self.loader.end_workers()


def _describe(loader: KeyedLoader, deal: ShardingPlan) -> dict[str, Any]:
    params, sampler = loader.params, loader.batches.order.sampler
    dataset = loader.keyed_dataset.dataset
    is_listed = params.batch_sampler is not None
    is_shared = deal.share.num_replicas > 1
    shared = {"is_distributed": deal.is_split or deal.is_own} if is_shared else {}
    mixed = {"mixture": dataset.describe()} if isinstance(dataset, Mixture) else {}
    return (
        shared
        | mixed
        | {
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
    )

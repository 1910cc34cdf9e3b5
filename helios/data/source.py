"""The data of a run: batches from any position of any epoch, and what is needed to resume.

A loader of ours computes a batch from its position and seeds before it fetches (DESIGN R1, R2); a
foreign one (:mod:`helios.data.external_loader`) goes on where it says it can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from helios.data.external_loader import ExternalSource
from helios.data.fetching import begin_pass
from helios.data.fingerprint import count_samples, describe_class, find_fingerprint
from helios.data.interfaces import BatchIterator, Source
from helios.data.loader import KeyedLoader
from helios.data.numpy_global_rng import LegacyWatch
from helios.data.order import Position
from helios.data.shard import LONE, Shard
from helios.data.sharding_plan import ShardingPlan, make_sharding_plan

__all__ = ["BatchIterator", "KeyedSource", "Source", "open_source"]


def open_source(
    loader: Iterable[Any],
    sampler: object = None,
    *,
    run_seed: int,
    purpose: str,
    share: Shard = LONE,
) -> Source:
    """Return the source over a loader.

    Args:
        loader: what a data module returned as loader.
        sampler: what it returned beside it.
        run_seed: seed of the run.
        purpose: name of the fetching streams: ``"fetch"`` for training, another one for each
            other phase, so that evaluation shares no randomness with training.
        share: the part of this process.

    Raises:
        ArgumentError: for a loader or sampler that cannot be shared as the run is.
    """
    if isinstance(loader, KeyedLoader):
        return KeyedSource(loader, run_seed, purpose, share)
    return ExternalSource(loader, sampler, run_seed=run_seed, purpose=purpose, share=share)


@final
class KeyedSource(Source):
    """The data of a loader of ours; exact from any position.

    Args:
        loader: the loader.
        run_seed: seed of the run.
        purpose: name of the fetching streams.
        share: the part of this process.
    """

    loader: KeyedLoader

    def __init__(
        self, loader: KeyedLoader, run_seed: int, purpose: str, share: Shard = LONE
    ) -> None:
        self.loader = loader
        self._run_seed = run_seed
        self._purpose = purpose
        self._watch = LegacyWatch(purpose, loader.flag)
        self._deal = make_sharding_plan(loader, share)
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
        return "restart" if self._deal.is_own else "exact"

    @property
    def ends_together(self) -> bool:
        """Whether it does; nobody knows of a user's sampler that splits the data by rank."""
        return not self._deal.is_own

    @property
    def state_is_per_process(self) -> bool:
        """Whether a user's sampler that splits the data by rank has a state."""
        return self._deal.is_own and self.loader.batches.order.has_state

    def batches(self, epoch: int, *, batch: int = 0, sample: int = 0) -> BatchIterator:
        """Begin a pass; nothing before its position is fetched."""
        position = Position(self._run_seed, self._purpose, epoch, batch, sample)
        self._pass_length = self.length
        self._watch.begin()
        return begin_pass(self.loader, self._deal, position, self._watch)

    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the batches of a whole pass that goes on at a position."""
        return self._deal.num_batches(batch=batch, sample=sample)

    def indices(self, epoch: int, *, batch: int = 0, sample: int = 0) -> list[Any] | None:
        """Return the indices of one batch's samples, computed anew: nothing is fetched or moved.

        Those of all V replicas, replica by replica. ``None`` where a user's sampler has a state or
        splits the data by rank, and where there is no such batch.
        """
        position = Position(self._run_seed, self._purpose, epoch, batch, sample)
        return self._deal.indices_at(position, self.loader.keyed_dataset.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a user's sampler had when the epoch began; empty without one."""
        return self.loader.batches.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give a user's sampler its state back."""
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

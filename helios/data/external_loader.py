"""Loaders that Helios did not make: iterated as they are, resumed only as far as they can be.

A foreign loader with ``state_dict`` and ``load_state_dict`` goes on where its own state says, and
so does an ``IterableDataset`` with them that is read in this process. Without them a loader cannot
be resumed, which the trainer refuses together with checkpoints.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, final

from torch import get_num_threads
from torch.utils.data import DataLoader, IterableDataset

from helios.core import rng
from helios.data.fingerprint import count_samples, describe_class, find_fingerprint
from helios.data.interfaces import BatchIterator, Source, run_on_one_thread
from helios.data.loader import WorkerInit, end_workers
from helios.data.numpy_global_rng import LegacyWatch
from helios.data.order import Position
from helios.data.samplers import HasEpoch
from helios.data.shard import LONE, Shard
from helios.errors import ArgumentError, StateError, UsageError
from helios.protocols import Stateful

_LOGGER = logging.getLogger(__name__)
_END = object()


@final
class ExternalSource(Source):
    """The data of a loader that Helios did not make.

    Args:
        loader: anything that can be iterated again and again.
        sampler: what the user handed over beside it; told the epoch.
        run_seed: seed of the run.
        purpose: name of the fetching streams.
        share: the part of this process: one replica, whose samples the loader gives.

    Raises:
        ArgumentError: where the process carries several replicas.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sampler: Any,
        *,
        run_seed: int,
        purpose: str,
        share: Shard = LONE,
    ) -> None:
        _check_lone(loader, share)
        self.loader = loader
        self._share = share
        self._run_seed = run_seed
        self._purpose = purpose
        self._stateful = _find_stateful(loader)
        self._listeners = _find_listeners(loader, sampler)
        self._length = _count_batches(loader)
        self._held_state: dict[str, Any] | None = None
        self._is_over = False
        self._end_state: list[Any] = []
        # Workers of a loader that is not ours cannot be watched: there is no room for a note.
        self._watch = LegacyWatch(purpose, flag=None)

    @property
    def description(self) -> dict[str, Any]:
        """What the data is, as far as it can be seen."""
        loader = self.loader
        found: dict[str, Any] = {"loader": type(loader).__qualname__}
        if isinstance(loader, DataLoader):
            found["dataset"] = describe_class(loader.dataset)
            found["fingerprint"] = find_fingerprint(loader.dataset)
            found["length"] = count_samples(loader.dataset)
            found["num_workers"] = loader.num_workers
        return found

    @property
    def can_resume(self) -> bool:
        """Whether the loader's state can be saved."""
        return self._stateful is not None

    @property
    def level(self) -> str:
        """``"restart"`` where the loader has a state, else ``"none"``."""
        return "none" if self._stateful is None else "restart"

    @property
    def claimant(self) -> str | None:
        """The class of the loader or data set whose own state a resume relies on."""
        return None if self._stateful is None else type(self._stateful).__qualname__

    @property
    def claimed(self) -> tuple[object, ...]:
        """The loader, and the data set where that is who has the state."""
        return () if self._stateful is None else (self.loader, self._stateful)

    @property
    def remedy(self) -> str:
        """What would make the loader resumable; empty where it is."""
        return "" if self.can_resume else _advise(self.loader)

    @property
    def ends_together(self) -> bool:
        """Not where each process has a loader of its own (R46)."""
        return self._share.num_replicas == 1

    @property
    def state_is_per_process(self) -> bool:
        """Where each process has a loader of its own, and this one has a state."""
        return not self.ends_together and self.can_resume

    def batches(self, epoch: int, *, batch: int = 0, sample: int = 0) -> BatchIterator:
        """Begin a pass where the loader begins it; ``batch`` only numbers what comes."""
        self.release_state()
        for listener in self._listeners:
            listener.set_epoch(epoch)
        replica = self._share.block.start
        position = Position(self._run_seed, self._purpose, epoch, batch, sample, replica=replica)
        if self._share.num_replicas > 1:
            self._seed_workers(position)
        self._watch.begin()
        if self._length is not None:
            return _CountedBatches(self.loader, position, self._watch, self._length)
        return _ProbedBatches(self.loader, position, self._watch, self)

    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the loader's length, where it can be trusted."""
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as it was after the batch that came last."""
        if self._stateful is None:
            return {}
        state = self.read_state() if self._held_state is None else self._held_state
        return {"loader": state} | ({"is_over": True} if self._is_over else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the loader its state back.

        Raises:
            StateError: if the state is missing, or nobody can take it.
        """
        if self._stateful is None and not state_dict:
            return
        if self._stateful is None or "loader" not in state_dict:
            raise StateError(
                f"{type(self.loader).__name__} and the checkpoint must agree on the loader's "
                f"state: the checkpoint holds {sorted(state_dict) or 'nothing'}. Use the loader "
                "that the run was started with."
            )
        self._stateful.load_state_dict(copy.deepcopy(state_dict["loader"]))
        self._end_state = [state_dict["loader"]] if state_dict.get("is_over") else []

    def hold_state(self) -> None:
        """Take the loader's state now, before it is asked for more than was handed out."""
        self._held_state = self.read_state()

    def note_end(self, *, is_over: bool) -> None:
        """Note whether the batch of the held state ends its pass."""
        self._is_over = is_over

    def release_state(self) -> None:
        """Let the loader speak for itself again."""
        self._held_state, self._is_over = None, False

    def begins_at_end(self, *, is_empty: bool) -> bool:
        """Whether the pass that begins now was complete when its state was saved.

        A stream that came to its end while its last batch was filled may begin anew from that
        state. It is put back then, since that is the next pass.

        Args:
            is_empty: whether the loader gives nothing more.
        """
        state, self._end_state = self._end_state, []
        if state and not is_empty and self._stateful is not None:
            self._stateful.load_state_dict(copy.deepcopy(state[0]))
        return bool(state)

    def read_state(self) -> dict[str, Any] | None:
        """Return a copy of the loader's present state."""
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def _seed_workers(self, position: Position) -> None:
        """Let the workers of a stream that we have made draw other numbers on each replica."""
        loader = self.loader
        if isinstance(loader, DataLoader) and isinstance(loader.worker_init_fn, WorkerInit):
            seed = rng.key("workers", position.run_seed, position.epoch, position.replica)
            loader.generator.manual_seed(seed)

    def close(self) -> None:
        """End persistent workers."""
        if isinstance(self.loader, DataLoader):
            end_workers(self.loader._iterator)  # noqa: SLF001 - PyTorch has no public way
            self.loader._iterator = None  # noqa: SLF001


def _find_stateful(loader: Any) -> Stateful | None:
    """Return whose state says where a pass goes on: the loader's, or its stream's.

    The stream of a loader with workers has a state in each of them, and not here.
    """
    if isinstance(loader, Stateful):
        return loader
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return None
    is_stream = isinstance(loader.dataset, IterableDataset)
    return loader.dataset if is_stream and isinstance(loader.dataset, Stateful) else None


def _advise(loader: Any) -> str:
    """Return what makes a loader resumable that is not."""
    if not isinstance(loader, DataLoader):
        return f"Give {type(loader).__name__} state_dict and load_state_dict."
    dataset, name = loader.dataset, type(loader.dataset).__name__
    if not isinstance(dataset, IterableDataset):
        return (
            f"Let create_dataloader make the loader of the {name}, in the data module's setup(): "
            f"self._train_dataset = self._create_dataset(dataset, DataLoaderParams(batch_size="
            f"{loader.batch_size}, shuffle=..., collate_fn=loader.collate_fn))."
        )
    if isinstance(dataset, Stateful):
        return (
            f"Workers hold the state of the {name}, out of reach: set num_workers=0, or return a "
            "torchdata.stateful_dataloader.StatefulDataLoader from train_dataloader()."
        )
    return (
        f"Give the {name} state_dict and load_state_dict and set num_workers=0, or use a map-style "
        "data set."
    )


def _check_lone(loader: Any, share: Shard) -> None:
    if len(share.block) != 1:
        raise ArgumentError(
            f"A {type(loader).__name__} that create_dataloader has not made from a map-style data "
            "set must be the loader of one replica, got a process that carries replicas "
            f"{list(share.block)}. Start as many processes as replicas ({share.num_replicas}) and "
            "split the data by rank, or use create_dataloader, whose order is dealt out to them."
        )


def _find_listeners(loader: Any, sampler: Any) -> list[HasEpoch]:
    """Return what wants to know the epoch: the loader, its samplers, its data set."""
    parts = [loader, sampler]
    if isinstance(loader, DataLoader):
        parts += [loader.sampler, loader.batch_sampler, loader.dataset]
    unique = {id(part): part for part in parts}
    return [part for part in unique.values() if isinstance(part, HasEpoch)]


def _count_batches(loader: Any) -> int | None:
    """Return the length of a loader; of an IterableDataset's PyTorch only estimates it."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


class _ForeignBatches(BatchIterator):
    """A pass over a foreign loader; the fetch is seeded where it runs in this process."""

    def __init__(self, loader: Iterable[Any], position: Position, watch: LegacyWatch) -> None:
        self._keys = position.fetch_keys()
        self._batch = position.batch
        self._watch = watch
        self._lives_on = isinstance(loader, DataLoader) and loader.persistent_workers
        # What a loader draws at its start, as PyTorch's shuffling does, follows from the position.
        with rng.stream(position.order_key()):
            self._batches: Iterator[Any] | None = iter(loader)

    def close(self) -> None:
        """End the pass; workers that are not persistent end with it."""
        if self._batches is None:
            return
        if not self._lives_on:
            end_workers(self._batches)
        self._batches = None
        self._watch.end()

    def _fetch(self) -> Any:
        """Return the next batch, or the end."""
        if self._batches is None:
            return _END
        rng.reseed(self._keys.at(self._batch))
        self._batch += 1
        if get_num_threads() == 1:
            return next(self._batches, _END)
        return run_on_one_thread(lambda batches: next(batches, _END), self._batches)


@final
class _CountedBatches(_ForeignBatches):
    """A pass whose last batch is known by the loader's length."""

    def __init__(
        self, loader: Iterable[Any], position: Position, watch: LegacyWatch, length: int
    ) -> None:
        super().__init__(loader, position, watch)
        self._length = length

    def __next__(self) -> Any:
        if self._batch >= self._length or self._batches is None:
            self.close()
            raise StopIteration
        batch = self._fetch()
        if batch is _END:
            raise UsageError(
                f"A loader must give as many batches as its length says, got {self._batch - 1} of "
                f"{self._length}. Correct its __len__, or leave it out."
            )
        self.is_last = self._batch == self._length
        return [batch]

    def close(self) -> None:
        """End the pass; a complete one is let run out, as loaders note only then that it is."""
        if self._batch >= self._length and self._fetch() is not _END:
            _LOGGER.warning(
                "A loader must give as many batches as its length says, and gave more than %d: the "
                "rest was left out. Correct its __len__, or leave it out.",
                self._length,
            )
        super().close()


@final
class _ProbedBatches(_ForeignBatches):
    """A pass over a loader without length: one batch is fetched ahead to see the end."""

    def __init__(
        self, loader: Iterable[Any], position: Position, watch: LegacyWatch, source: ExternalSource
    ) -> None:
        super().__init__(loader, position, watch)
        self._source = source
        self._following: Any = _END
        self._is_begun = False

    def __next__(self) -> Any:
        if not self._is_begun:
            self._is_begun = True
            self._following = self._fetch()
            if self._source.begins_at_end(is_empty=self._following is _END):
                self._following = _END
        batch = self._following
        if batch is _END:
            self.close()
            raise StopIteration
        self._source.hold_state()
        self._following = self._fetch()
        self.is_last = self._following is _END
        self._source.note_end(is_over=self.is_last)
        return [batch]

    def close(self) -> None:
        """End the pass; after a cut one the state stays that of the batch that came last."""
        self._following = _END
        if self.is_last:
            self._source.release_state()
        super().close()

"""Runs custom loaders, which ``create_dataloader`` did not create.

A custom loader with ``state_dict`` and ``load_state_dict`` resumes from its own state; so does an
``IterableDataset`` with these methods that is read in this process. Other loaders cannot be
resumed, so the trainer rejects them if checkpoints are saved.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, final

from torch import Tensor, get_num_threads
from torch.utils.data import DataLoader, IterableDataset

from helios.core import rng
from helios.core.utils import Stateful
from helios.data.fingerprint import describe_class, find_fingerprint, length_of
from helios.data.order import Position
from helios.data.samplers import HasEpoch
from helios.data.source import (
    BatchIterator,
    ByOwnState,
    CannotResume,
    Shard,
    Source,
    run_on_one_thread,
)
from helios.data.workers import WorkerInit, WorkerItems, WorkersLost, end_workers
from helios.errors import ArgumentError, StateError, UsageError
from helios.state.digests import Identities, mark_of
from helios.state.values import children_of, each_in

_LOGGER = logging.getLogger(__name__)
_END = object()
_TIMEOUT = 300.0
_NUM_TRIED = 3
_MOST_COPIED = 64 << 20


@final
class ExternalSource(Source):
    """The data of a custom loader.

    Args:
        loader: an iterable that can be iterated several times.
        sampler: the sampler that the user returned with it; its ``set_epoch`` is called.
        begin: has the seed of the run, and the name of the random streams of fetching.
        share: the part of this process: one replica, whose samples the loader returns.

    Raises:
        ArgumentError: if the process runs several replicas.
    """

    def __init__(self, loader: Iterable[Any], sampler: Any, begin: Position, share: Shard) -> None:
        super().__init__()
        if len(share.block) != 1:
            raise ArgumentError(
                f"A {type(loader).__name__} that create_dataloader did not create from a map-style "
                "data set must be the loader of one replica, but this process runs replicas "
                f"{list(share.block)}. Start as many processes as replicas ({share.num_replicas}) "
                "and split the data by rank, or use create_dataloader, which shards the data; a "
                "stream can be sharded by helios.data.Stream."
            )
        self.loader = loader
        self._share = share
        self._begin = begin
        self._stateful = holder = _find_stateful(loader)
        self.resumes_by = CannotResume(_advise(loader)) if holder is None else ByOwnState(holder)
        self._listeners = _find_listeners(loader, sampler)
        # PyTorch only estimates the length of a stream.
        is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        self._length = None if is_stream else length_of(loader)
        self._held_state: dict[str, Any] | None = None
        self._is_over = False
        self._end_state: list[Any] = []

    def _describe(self) -> dict[str, Any]:
        loader = self.loader
        found: dict[str, Any] = {"loader": type(loader).__qualname__}
        if isinstance(loader, DataLoader):
            found["dataset"] = describe_class(loader.dataset)
            found["fingerprint"] = find_fingerprint(loader.dataset)
            found["length"] = length_of(loader.dataset)
            found["num_workers"] = loader.num_workers
        return found

    @property
    def ends_together(self) -> bool:
        """False if there are several processes, each of which has its own loader."""
        return self._share.num_replicas == 1

    @property
    def state_is_per_process(self) -> bool:
        """Whether each process has its own loader, and the loader has a state."""
        return not self.ends_together and self._stateful is not None

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        """Start a pass; the loader decides where, ``batch`` only numbers the batches."""
        self.release_state()
        for listener in self._listeners:
            listener.set_epoch(epoch)
        loader, replica = self.loader, self._share.block.start
        position = replace(self._begin, epoch=epoch, batch=batch, sample=sample, replica=replica)
        is_of_helios = isinstance(loader, DataLoader) and isinstance(
            loader.worker_init_fn, WorkerInit
        )
        if is_of_helios and self._share.num_replicas > 1:
            # The workers of a stream, differently on each replica.
            loader.generator.manual_seed(position.worker_key(replica))
        if self._length is not None:
            return _CountedBatches(self, position, self._length)
        return _ProbedBatches(self, position)

    def _count_batches(self, batch: int, sample: int) -> int | None:
        """Return the loader's length, if it can be trusted."""
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as it was after the batch that was returned last."""
        if self._stateful is None:
            return {}
        state = self.read_state() if self._held_state is None else self._held_state
        # What was loaded, and not begun yet, is as it was.
        is_over = self._is_over or bool(self._end_state)
        return {"loader": state} | ({"is_over": True} if is_over else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader's state.

        Raises:
            StateError: if the state is missing, or if the loader cannot load it.
        """
        if self._stateful is None and not state_dict:
            return
        if self._stateful is None or "loader" not in state_dict:
            raise StateError(
                f"The state of the loader in the checkpoint does not fit a "
                f"{type(self.loader).__name__}: it contains {sorted(state_dict) or 'nothing'}. Use "
                "the loader that the run was started with."
            )
        self._stateful.load_state_dict(copy.deepcopy(state_dict["loader"]))
        self._end_state = [state_dict["loader"]] if state_dict.get("is_over") else []

    def hold_state(self, state: dict[str, Any] | None, *, is_over: bool = False) -> None:
        """Use a state that was read before the next batch was fetched ahead.

        Args:
            state: the state.
            is_over: whether the batch before it is the last one of its pass.
        """
        self._held_state, self._is_over = state, is_over

    def release_state(self) -> None:
        """Use the loader's current state again instead of the held one."""
        self._held_state, self._is_over = None, False

    def begins_at_end(self, *, is_empty: bool) -> bool:
        """Return whether the pass that starts now was complete when its state was saved.

        A stream that ended while its last batch was filled may start over from that state. Then the
        state is loaded again, because those batches belong to the next pass.

        Args:
            is_empty: whether the loader returns no more batches.
        """
        state, self._end_state = self._end_state, []
        if state and not is_empty and self._stateful is not None:
            self._stateful.load_state_dict(copy.deepcopy(state[0]))
        return bool(state)

    def read_state(self) -> dict[str, Any] | None:
        """Return a copy of the loader's current state."""
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def close(self) -> None:
        """End persistent workers."""
        if isinstance(self.loader, DataLoader):
            end_workers(self.loader)


def _find_stateful(loader: Any) -> Stateful | None:
    """Return the object that has the position of a pass: the loader or its stream.

    With workers, the stream's state is in each worker, out of reach.
    """
    if isinstance(loader, Stateful):
        return loader
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return None
    is_stream = isinstance(loader.dataset, IterableDataset)
    return loader.dataset if is_stream and isinstance(loader.dataset, Stateful) else None


def _advise(loader: Any) -> str:
    """Return how to make a loader resumable."""
    kind = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
    return (
        "Let Helios create it, in the data module's setup(): self.train_dataset = "
        "self.create_dataset(dataset, batch_size=...); a stream as a helios.data.Stream. Or give "
        f"the {kind} state_dict and load_state_dict, with num_workers=0, or return a "
        "torchdata.stateful_dataloader.StatefulDataLoader from train_dataloader()."
    )


def _find_listeners(loader: Any, sampler: Any) -> list[HasEpoch]:
    """Return the objects with ``set_epoch``: the loader, its samplers, its data set."""
    parts = [loader, sampler]
    if isinstance(loader, DataLoader):
        parts += [loader.sampler, loader.batch_sampler, loader.dataset]
    unique = {id(part): part for part in parts}
    return [part for part in unique.values() if isinstance(part, HasEpoch)]


def _next_or_end(batches: Iterator[Any]) -> Any:
    return next(batches, _END)


class _ForeignBatches(BatchIterator):
    """A pass over a custom loader; a fetch in this process is seeded."""

    def __init__(self, source: ExternalSource, position: Position) -> None:
        self._source = source
        self._keys = position.fetch_keys()
        self._batch = position.batch
        self._batches: Iterator[Any] | None
        loader = source.loader
        # Random numbers drawn by iter(), as for PyTorch's shuffling, depend on the position.
        with rng.stream(position.order_key()):
            if not isinstance(loader, DataLoader) or not loader.num_workers:
                self._batches = iter(loader)
                return
            # Where it cannot go on, new workers would not help.
            can_resume = not isinstance(source.resumes_by, CannotResume)
            timeout = loader.timeout or (_TIMEOUT if can_resume else None)
            self._batches = WorkerItems(lambda: iter(loader), loader, timeout)

    def close(self) -> None:
        """End the pass and workers that are not persistent."""
        batches, self._batches = self._batches, None
        if isinstance(batches, WorkerItems):
            batches.close()

    def _fetch(self) -> Any:
        """Return the next batch, or ``_END``."""
        if self._batches is None:
            return _END
        rng.reseed(self._keys.at(self._batch))
        batches = self._batches
        is_alone = get_num_threads() == 1
        found = _next_or_end(batches) if is_alone else run_on_one_thread(_next_or_end, batches)
        self._batch += 1
        return found


@final
class _CountedBatches(_ForeignBatches):
    """A pass over a loader with a length, from which the last batch is known."""

    def __init__(self, source: ExternalSource, position: Position, length: int) -> None:
        super().__init__(source, position)
        self._length = length

    def __next__(self) -> Any:
        if self._batch >= self._length or self._batches is None:
            self.close()
            raise StopIteration
        batch = self._fetch()
        if batch is _END:
            raise UsageError(
                f"A loader must return as many batches as its length, got {self._batch - 1} of "
                f"{self._length}. Fix its __len__, or remove it."
            )
        self.is_last = self._batch == self._length
        return [batch]

    def close(self) -> None:
        """End the pass; a complete one is exhausted first, so that the loader records its end."""
        with contextlib.suppress(WorkersLost):
            if self._batch >= self._length and self._fetch() is not _END:
                _LOGGER.warning(
                    "A loader must return as many batches as its length, but returned more than "
                    "%d. The rest was skipped. Fix its __len__, or remove it.",
                    self._length,
                )
        super().close()


@final
class _ProbedBatches(_ForeignBatches):
    """A pass over a loader without a length; one batch is fetched ahead to detect the end."""

    def __init__(self, source: ExternalSource, position: Position) -> None:
        super().__init__(source, position)
        self._following: Any = _END
        self._is_begun = False

    def __next__(self) -> Any:
        if not self._is_begun:
            self._is_begun = True
            self._source.hold_state(self._source.read_state())
            self._following = self._fetch()
            if self._source.begins_at_end(is_empty=self._following is _END):
                self._following = _END
        batch = self._following
        if batch is _END:
            self.close()
            raise StopIteration
        state = self._source.read_state()
        self._following = self._fetch()
        self.is_last = self._following is _END
        self._source.hold_state(state, is_over=self.is_last)
        return [batch]

    def close(self) -> None:
        """End the pass; if it is incomplete, the state remains that of the last batch."""
        self._following = _END
        if self.is_last:
            self._source.release_state()
        super().close()


def try_state(source: Source) -> bool | None:
    """Save a source's state after a few batches, load it into a copy, and compare the next batch.

    Helios cannot know whether a user's ``state_dict`` holds everything that the next batch depends
    on, but it can try in memory. The run is not changed: only copies are used, and all generators
    are restored.

    Args:
        source: the source, before its first pass.

    Returns:
        Whether the next batch was the same; ``None`` if that is unknown: there is none, the copies
        would take more than 64 MiB, or the user's code has failed on a copy.
    """
    whole = source.num_batches()
    num_batches = _NUM_TRIED if whole is None else min(_NUM_TRIED, whole - 1)
    if num_batches < 1 or _is_too_large(source):
        return None
    try:
        with rng.stream(0):
            undisturbed, resumed = copy.deepcopy(source), copy.deepcopy(source)
            batches = undisturbed.batches(0)
            for _ in range(num_batches):
                next(batches)
            state = copy.deepcopy(undisturbed.state_dict())
            expected = next(batches)
            resumed.load_state_dict(state)
            found = next(resumed.batches(0, batch=num_batches), None)
        return compare_batches(expected, found)
    except Exception as error:
        # An error of the user's code on a copy does not stop the run.
        _LOGGER.debug("The state of the training loader could not be checked: %r", error)
        return None


def _is_too_large(root: object) -> bool:
    size = 0
    for value in each_in(root, children_of):
        is_tensor = isinstance(value, Tensor)
        size += value.untyped_storage().nbytes() if is_tensor else sys.getsizeof(value, 0)
        if size > _MOST_COPIED:
            return True
    return False


def compare_batches(expected: Any, found: Any) -> bool | None:
    """Return whether two batches have the same bytes; ``None`` if that is unknown."""
    identities = Identities()
    if mark_of(expected, identities) == mark_of(found, identities):
        return True
    # What is compared by identity may be equal nevertheless.
    return None if identities.num_given else False

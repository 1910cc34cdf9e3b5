"""Streams: data that can only be read one sample after the other, in a part for each replica.

Parts are read batch by batch, in the training process or in a worker. A worker reads whole parts,
so the samples of a part do not depend on the number of workers. Every item of a worker holds one
batch for each of its replicas; so items of all workers alternate.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from torch import get_num_threads
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker

from helios.core import rng
from helios.core.utils import Stateful
from helios.data.fingerprint import describe_class, find_fingerprint
from helios.data.order import Position
from helios.data.params import DataLoaderParams
from helios.data.samplers import HasEpoch
from helios.data.source import (
    NO_BATCH,
    BatchIterator,
    Shard,
    Source,
    pin,
    run_on_one_thread,
)
from helios.data.workers import Parcel, WorkerItems
from helios.errors import ArgumentError, ArgumentTypeError, StateError, UsageError

_LOGGER = logging.getLogger(__name__)
_REPLAYED_AT_ONCE = 64
"""Batches of a step of a replay, after each of which the run gets on."""
_PARTS = "parts"
_ANY_KEY = 0
"""What generators are seeded from while they are kept: each read seeds them again."""


@runtime_checkable
class Shardable(Protocol):
    """An iterable that returns a part of itself, such as a stream of Hugging Face."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return a part, numbered from 0, of ``num_shards`` disjoint ones."""
        ...


@final
class Stream(IterableDataset[Any]):
    """Samples that can only be read one after the other, in a part for each replica.

    Each epoch opens every part anew: ``source.shard(num_replicas, replica)``, or ``source(replica,
    num_replicas)``, then ``set_epoch(epoch)`` of the result, if it has that. While a part is
    opened, and before each batch is read, ``torch``, ``random`` and Helios' NumPy generator are
    seeded by epoch, batch and replica. So the samples depend neither on the number of processes nor
    on loader workers, if the source draws from these, or from a seed and the epoch.

    A run that resumes inside an epoch restores the state of each part, if it has ``state_dict``
    and ``load_state_dict`` and these passed a test at the first start of the run. Otherwise it
    reads the epoch again up to its position.

    Args:
        source: an object with ``shard(num_shards, index)``, or a function that takes index and
            number of a part and returns an iterable over its samples.

    Raises:
        ArgumentTypeError: if the source is neither.
    """

    def __init__(
        self,
        source: Shardable | Callable[[int, int], Iterable[Any]],
    ) -> None:
        if not isinstance(source, Shardable) and not callable(source):
            raise ArgumentTypeError(
                "Stream(source=...) must have shard(num_shards, index), or be a function that "
                "takes index and number of a part and returns an iterable, got "
                f"{type(source).__name__}. Pass lambda index, count: ..., which reads every "
                "count-th file."
            )
        self.source = source

    def open(self, index: int, count: int, epoch: int) -> Iterable[Any]:
        """Return one of ``count`` parts for an epoch."""
        source = self.source
        part = source.shard(count, index) if isinstance(source, Shardable) else source(index, count)
        if isinstance(part, HasEpoch):
            part.set_epoch(epoch)
        return part

    def __iter__(self) -> Iterator[Any]:
        return iter(self.open(0, 1, 0))


class Read(NamedTuple):
    """A batch of one replica.

    Attributes:
        batch: the batch.
        state: the state of the part after the batch, and whether it has ended; ``None`` if states
            are not used.
        size: their number.
    """

    batch: Any
    state: Any
    size: int


@dataclass(frozen=True)
class StreamPlan:
    """The settings that the readers of a pass share.

    Attributes:
        stream: the stream.
        seed: seed of what parts draw while they are opened, in addition to that of the run.
        num_replicas: number of its parts.
        batch_size: samples per batch; ``None`` if samples are not collated.
        drop_last: whether to drop an incomplete last batch.
        collate: combines samples into a batch, or converts a single sample.
        position: where the pass starts, for all replicas.
        states: states of parts at that position, by replica; others are replayed.
        keeps_state: whether to return the state of parts with each batch.
    """

    stream: Stream
    seed: int
    num_replicas: int
    batch_size: int | None
    drop_last: bool
    collate: Callable[[Any], Any]
    position: Position
    states: dict[int, Any]
    keeps_state: bool

    def cut_replay(self) -> list[int]:
        """Return the samples of a replica in each step of a replay; empty if there is none.

        All but the last step consist of whole batches, each of which is seeded.
        """
        count, size = self.position.sample // self.num_replicas, self.batch_size or 1
        if len(self.states) == self.num_replicas:
            return []
        step = _REPLAYED_AT_ONCE * size
        return [min(step, count - first) for first in range(0, count, step)]


@final
class StreamLoader(DataLoader[Any]):
    """The result of :func:`create_dataloader` for a stream; only a trainer reads it.

    Args:
        stream: the stream.
        params: the validated options.
        options: those of them that PyTorch's loader takes.

    Attributes:
        stream: as given.
        params: as given.
        options: as given.

    Raises:
        ArgumentError: if the replicas are not to share the stream.
    """

    def __init__(self, stream: Stream, params: DataLoaderParams, options: dict[str, Any]) -> None:
        if params.is_distributed is False:
            raise ArgumentError(
                "DataLoaderParams(is_distributed=False) cannot be used with a Stream, which has a "
                "part for each replica. Let Stream(lambda index, count: ...) return all samples."
            )
        # Without workers, about whose number PyTorch would warn: a pass may start fewer.
        super().__init__(stream, batch_size=params.batch_size, collate_fn=params.collate_fn)
        self.stream = stream
        self.params = params
        self.options = options

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        raise UsageError(
            "The loader of a Stream can only be read by a Trainer. Iterate over the Stream itself, "
            "which yields its samples."
        )


@final
class StreamReader(IterableDataset[Any]):
    """Iterates over a list for each iteration: a :class:`Read` or ``None`` for each replica.

    After the end of a part, its entries are ``None``, without an end. If there is a replay, the
    first items are numbers, one for each step: how many samples of each replica were read again.

    Args:
        plan: what all readers have in common.
        replicas: the replicas of each worker; of the training process, if there is none.
    """

    def __init__(self, plan: StreamPlan, replicas: Sequence[Sequence[int]]) -> None:
        self._plan = plan
        self._replicas = replicas

    def __iter__(self) -> Iterator[int | list[Read | None]]:
        info = get_worker_info()
        if info is not None:
            # A stream that divides itself among workers would leave out samples.
            torch_worker._worker_info = None  # noqa: SLF001 - PyTorch has no public way
        own = self._replicas[0 if info is None else info.id]
        parts = [_Part(self._plan, replica) for replica in own]
        for count in self._plan.cut_replay():
            for part in parts:
                part.skip(count)
            yield count
        while True:
            yield [part.read() for part in parts]


@final
class _Part:
    """The part of one replica."""

    def __init__(self, plan: StreamPlan, replica: int) -> None:
        position = replace(plan.position, replica=replica)
        self._plan = plan
        self._keys = position.fetch_keys()
        self._size = plan.batch_size or 1
        self._batch = position.batch
        self._num_skipped = 0
        # What the part draws while it is opened must not depend on the process or worker.
        rng.reseed(rng.key("stream", position.order_key(), plan.seed, replica))
        self._part = plan.stream.open(replica, plan.num_replicas, position.epoch)
        self._is_restored = replica in plan.states
        self._samples: Iterator[Any] = iter(())
        # A part that ended while its last batch was filled may start over from its state.
        if self._is_restored and plan.states[replica]["is_over"]:
            return
        if self._is_restored and isinstance(self._part, Stateful):
            self._part.load_state_dict(copy.deepcopy(plan.states[replica]["state"]))
        self._samples = iter(self._part)

    def skip(self, count: int) -> None:
        """Read samples of a replay; each batch is seeded as when it was read first."""
        if self._is_restored:
            return
        for first in range(self._num_skipped, self._num_skipped + count, self._size):
            rng.reseed(self._keys.at(first // self._size))
            size = min(self._size, self._num_skipped + count - first)
            next(islice(self._samples, size, size), None)
        self._num_skipped += count

    def read(self) -> Read | None:
        """Return the next batch; ``None`` if there is none."""
        plan = self._plan
        rng.reseed(self._keys.at(self._batch))
        samples = list(islice(self._samples, self._size))
        if not samples or (plan.drop_last and len(samples) < self._size):
            return None
        self._batch += 1
        batch = plan.collate(samples if plan.batch_size else samples[0])
        state = None
        if plan.keeps_state and isinstance(self._part, Stateful):
            is_over = len(samples) < self._size
            state = {"state": copy.deepcopy(self._part.state_dict()), "is_over": is_over}
        return Read(batch, state, len(samples))


@final
class StreamSource(Source):
    """The data of a stream, each replica with a part of its own.

    Args:
        loader: the loader.
        begin: has the seed of the run, and the name of the random streams of fetching.
        share: the part of this process.

    Attributes:
        uses_state: whether a resume restores the states of parts, instead of a replay.
    """

    loader: StreamLoader

    def __init__(self, loader: StreamLoader, begin: Position, share: Shard) -> None:
        super().__init__()
        self.loader = loader
        self.share = share
        self.uses_state = False
        self._begin = begin
        self._states: dict[int, Any] = {}
        self._pass: _StreamBatches | None = None

    def _describe(self) -> dict[str, Any]:
        params, source = self.loader.params, self.loader.stream.source
        return {
            "dataset": f"Stream({describe_class(source)})",
            "fingerprint": find_fingerprint(source),
            "batch_size": params.batch_size,
            "drop_last": params.drop_last,
            "seed": params.random_seed,
            "num_workers": params.num_workers,
        }

    @property
    def ends_together(self) -> bool:
        """Whether this process runs all replicas, so that it sees the end of each part."""
        return len(self.share.block) == self.share.num_replicas

    def find_stateful(self) -> str:
        """Return the class of the parts if they have a state; opens one to find out.

        The result is empty if they have none.
        """
        stream, share = self.loader.stream, self.share
        with rng.stream(self._begin.order_key()):
            part = stream.open(share.block.start, share.num_replicas, 0)
        return type(part).__qualname__ if isinstance(part, Stateful) else ""

    def for_trial(self) -> StreamSource:
        """Return the data of one replica, read in this process, with the states of its part."""
        params = self.loader.params.without_workers()
        loader = StreamLoader(self.loader.stream, params, {})
        share = replace(self.share, block=self.share.block[:1])
        source = StreamSource(loader, self._begin, share)
        source.uses_state = True
        return source

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        loader, params = self.loader, self.loader.params
        states, self._states = self._states if batch else {}, {}
        collate = params.collate_fn or (default_collate if params.batch_size else default_convert)
        plan = StreamPlan(
            stream=loader.stream,
            seed=params.random_seed,
            num_replicas=self.share.num_replicas,
            batch_size=params.batch_size,
            drop_last=params.drop_last,
            collate=collate,
            position=replace(self._begin, epoch=epoch, batch=batch, sample=sample),
            states=states,
            keeps_state=self.uses_state,
        )
        if plan.cut_replay() and not states:
            _LOGGER.info(
                "The stream has no state to restore: epoch %d is read again up to its position, %d "
                "samples of each replica.",
                epoch + 1,
                sum(plan.cut_replay()),
            )
        self._pass = _StreamBatches(loader, plan, self.share)
        return self._pass

    def _count_batches(self, batch: int, sample: int) -> int | None:
        """Return ``None``: only reading shows where a stream ends."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part after the last iteration.

        These are the parts of the replicas of this process.
        """
        if self._pass is None:
            return {}
        states = {str(replica): state for replica, state in self._pass.states.items()}
        return {_PARTS: states} if self.uses_state and states else {}

    def holds_states(self, state_dict: dict[str, Any]) -> bool:
        """Return whether a resume from a state restores the states of parts."""
        return bool(state_dict.get(_PARTS))

    def gather_state(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return the state of all parts."""
        states = gather(self.state_dict())
        parts = {name: part for state in states for name, part in state.get(_PARTS, {}).items()}
        return {**states[0], _PARTS: parts} if parts else states[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, of all replicas.

        Raises:
            StateError: if it is the state of another loader.
        """
        if not state_dict.keys() <= {_PARTS}:
            raise StateError(
                "The state of the loader in the checkpoint is not that of a Stream: it contains "
                f"{sorted(state_dict)}. Use the data that the run was started with."
            )
        self.uses_state = self.holds_states(state_dict)
        parts = state_dict[_PARTS] if self.uses_state else {}
        self._states = {int(replica): state for replica, state in parts.items()}


@final
class _StreamBatches(BatchIterator):
    """One pass.

    Attributes:
        states: states of the parts after the last iteration, by replica.
    """

    def __init__(self, loader: StreamLoader, plan: StreamPlan, share: Shard) -> None:
        self.num_samples = share.num_replicas * (plan.batch_size or 1)
        self.states = {each: plan.states[each] for each in share.block if each in plan.states}
        self._share = share
        self._num_before = plan.position.batch
        self._is_closed = False
        self._num_workers = min(loader.params.num_workers, len(share.block))
        self._num_readers = max(1, self._num_workers)
        # The replicas of each reader, each of which reads whole parts.
        self._deals = [share.block[each :: self._num_readers] for each in range(self._num_readers)]
        self._dealt = [replica for deal in self._deals for replica in deal]
        self._loader, self._plan = loader, plan
        self._items = self._open()
        self._pins = bool(loader.options.get("pin_memory")) and not self._num_workers
        self._replay = deque(plan.cut_replay())
        self._following: list[Read | None] | None = None
        self._is_begun = False
        self._sizes: list[int] = []

    def size(self, place: int) -> int | None:
        """Return the samples of a batch."""
        return self._sizes[place]

    def catch_up(self) -> Iterator[None]:
        """Read the epoch again up to the position."""
        while self._replay:
            # The hooks that follow must draw the same numbers as in a run that was not interrupted.
            with rng.stream(_ANY_KEY):
                self._read_each()
            self._replay.popleft()
            yield

    def __next__(self) -> Any:
        if self._is_closed:
            raise StopIteration
        if self._is_begun:
            return self._advance()
        self._is_begun = True
        deque(self.catch_up(), maxlen=0)
        # A run that resumes at the end of an epoch has nothing left to read, and hooks follow.
        with rng.stream(_ANY_KEY):
            self._following = self._read()
            if self._following is None and self._num_before == 0 and self._share.pads:
                raise ArgumentError(
                    "The part of a Stream for each replica must contain at least one batch, but "
                    f"that of one of the replicas {list(self._share.block)} contains none. Divide "
                    f"the data into at least {self._share.num_replicas} non-empty shards, or "
                    "reduce num_replicas or batch_size."
                )
            return self._advance()

    def _advance(self) -> list[Any]:
        found = self._following
        if found is None:
            self.close()
            raise StopIteration
        # First, as the states stay those before this iteration if workers are lost.
        following = self._read()
        pairs = list(zip(self._share.block, found, strict=True))
        self.states = {replica: each.state for replica, each in pairs if each is not None}
        self._sizes = [0 if each is None else each.size for each in found]
        self._following, self.is_last = following, following is None
        return [NO_BATCH if each is None else each.batch for each in found]

    def _open(self) -> Iterator[Any]:
        """Return the items of all readers in turn."""
        reader, loader = StreamReader(self._plan, self._deals), self._loader
        if not self._num_workers:
            return iter(reader)
        options = {**loader.options, "num_workers": self._num_workers, "persistent_workers": False}
        workers: DataLoader[Any] = DataLoader(
            reader, batch_size=None, **{**options, "collate_fn": Parcel}
        )
        timeout = loader.params.worker_timeout
        return WorkerItems(lambda: iter(workers), workers, timeout)

    def close(self) -> None:
        """End the pass and its workers."""
        if isinstance(self._items, WorkerItems):
            self._items.close()
        self._items, self._is_closed = iter(()), True

    def _read(self) -> list[Read | None] | None:
        """Read the next iteration; ``None`` after the last one.

        In training it ends with the first part that ends, otherwise with the last one.
        """
        found = dict(zip(self._dealt, chain.from_iterable(self._read_each()), strict=True))
        reads = [found[replica] for replica in self._share.block]
        ends = [each is None for each in reads]
        if any(ends) if self._share.pads else all(ends):
            return None
        return reads

    def _read_each(self) -> list[Any]:
        return [self._take() for _ in range(self._num_readers)]

    def _take(self) -> Any:
        if self._num_workers or get_num_threads() == 1:
            if isinstance(self._items, WorkerItems):
                # A step of a replay reads many batches.
                timeout = self._loader.params.worker_timeout
                self._items.timeout = None if self._replay else timeout
            item = next(self._items)
        else:
            item = run_on_one_thread(next, self._items)
        return pin(item) if self._pins else item

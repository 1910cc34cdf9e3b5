"""A stream that can be sharded: each replica reads a part of its own, in any process.

Parts are read batch by batch, in the training process or in a worker. A worker reads whole parts,
so what a part returns does not depend on the number of workers. Every item of a worker holds one
batch for each of its replicas; so items of all workers alternate.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from helios.core import rng
from helios.core.utils import Stateful, read_signature
from helios.data.order import Position
from helios.data.params import DataLoaderParams
from helios.data.samplers import HasEpoch
from helios.errors import ArgumentError, ArgumentTypeError, UsageError

_LOGGER = logging.getLogger(__name__)
_REPLAY_STEPS = 100
"""Into how many steps a replay is divided, to show its progress."""


@runtime_checkable
class Shardable(Protocol):
    """An iterable that returns a part of itself, such as a stream of Hugging Face."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return a part, numbered from 0, of ``num_shards`` disjoint ones."""
        ...


@runtime_checkable
class _CountsShards(Protocol):
    """A shardable that says into how many parts it can be divided."""

    num_shards: int


@final
class Stream(IterableDataset[Any]):
    """Samples that can only be read one after the other, in a part for each replica.

    Each epoch opens every part anew: ``source.shard(num_replicas, replica)``, or ``source(replica,
    num_replicas)``, then ``set_epoch(epoch)`` of the result, if it has that. While a part is
    opened, and before each batch is read, ``torch``, ``random`` and Helios' NumPy generator are
    seeded by epoch, batch and replica. So what is read depends neither on the number of processes
    nor on loader workers, if the source draws from these, or from a seed and the epoch.

    A run that resumes inside an epoch restores the state of each part, if it has ``state_dict``
    and ``load_state_dict`` and these passed a test at the first start of the run. Otherwise it
    reads the epoch again up to its position.

    Args:
        source: an object with ``shard(num_shards, index)``, or a function that takes index and
            number of a part and returns an iterable over its samples.
        replay: whether to read the epoch again even if parts have a state.

    Raises:
        ArgumentTypeError: if the source is neither, or a function of other parameters.
    """

    def __init__(
        self,
        source: Shardable | Callable[[int, int], Iterable[Any]],
        *,
        replay: bool = False,
    ) -> None:
        if not isinstance(source, Shardable) and not callable(source):
            raise ArgumentTypeError(
                "Stream(source=...) must have shard(num_shards, index), or be a function that "
                "takes index and number of a part and returns an iterable, got "
                f"{type(source).__name__}. Pass lambda index, count: ..., which reads every "
                "count-th file."
            )
        if not isinstance(source, Shardable):
            _check_parameters(source)
        if not isinstance(replay, bool):
            raise ArgumentTypeError(
                f"Stream(replay=...) must be True or False, got {replay!r}. Omit it for False."
            )
        self.source = source
        self.replay = replay

    def open(self, index: int, count: int, epoch: int) -> Iterable[Any]:
        """Return one of ``count`` parts for an epoch.

        Raises:
            ArgumentTypeError: if the source returns something else than an iterable.
        """
        source = self.source
        part = source.shard(count, index) if isinstance(source, Shardable) else source(index, count)
        if not isinstance(part, Iterable) and not callable(getattr(part, "__getitem__", None)):
            raise ArgumentTypeError(
                "Stream(source=...) must return an iterable over the samples of a part, got "
                f"{part!r} for part {index} of {count}. Return one, or yield the samples."
            )
        if isinstance(part, HasEpoch):
            part.set_epoch(epoch)
        return part

    def check_shards(self, count: int) -> None:
        """Check that there is a part for each replica, as far as the source says.

        Raises:
            ArgumentError: if there are fewer.
        """
        source = self.source
        if isinstance(source, _CountsShards) and source.num_shards < count:
            raise make_shard_error(source.num_shards, count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.open(0, 1, 0))


def _check_parameters(source: Callable[[int, int], Iterable[Any]]) -> None:
    try:
        signature = read_signature(source)
    except ValueError:  # Some built-in functions have none.
        return
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise ArgumentTypeError(
            "Stream(source=...) must be a function that takes index and number of a part, but it "
            f"takes {signature}. Correct its parameters."
        ) from error


def make_shard_error(found: int, count: int) -> ArgumentError:
    """Return the error for fewer parts than replicas."""
    return ArgumentError(
        f"A Stream must have a shard for each of the {count} replicas, got {found}. Write the data "
        f"to at least {count} files, reduce num_replicas, or shard a Hugging Face stream further "
        "(reshard, or to_iterable_dataset(num_shards=...))."
    )


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
    """What the readers of a pass have in common.

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

    @property
    def num_replayed(self) -> int:
        """How many samples of a replica are before the position."""
        return self.position.sample // self.num_replicas

    def cut_replay(self) -> list[int]:
        """Return the samples of a replica in each step of a replay; empty if there is none.

        All but the last step consist of whole batches, each of which is seeded.
        """
        count, size = self.num_replayed, self.batch_size or 1
        if len(self.states) == self.num_replicas or not count:
            return []
        bounds = [count * step // _REPLAY_STEPS // size * size for step in range(_REPLAY_STEPS)]
        return [stop - start for start, stop in pairwise([*bounds, count])]


@final
class StreamLoader(DataLoader[Any]):
    """What :func:`create_dataloader` returns for a stream; only a trainer reads it.

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
        if params.persistent_workers:
            _LOGGER.warning(
                "DataLoaderParams(persistent_workers=True) has no effect with a Stream, whose "
                "workers end with each epoch."
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

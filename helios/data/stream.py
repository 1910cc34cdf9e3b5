"""A stream that can be sharded: each replica reads a part of its own, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final, runtime_checkable

from torch.utils.data import IterableDataset

from helios.core.signatures import read_signature
from helios.core.tracebacks import with_short_constructor
from helios.data.samplers import HasEpoch
from helios.errors import ArgumentError, ArgumentTypeError


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


@with_short_constructor
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

"""Samplers, which determine the order of samples in an epoch.

The built-in samplers compute the samples from a position without iterating over those before it.
A user's sampler derives from one of the two bases and iterates; :mod:`helios.data.order` runs both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

from torch.utils.data import DistributedSampler, Sampler

from helios.core import rng
from helios.core.registry import Registry
from helios.data.permutation import Permutation

_BLOCK = 4_096

SAMPLER_REGISTRY = Registry("sampler")


@runtime_checkable
class HasEpoch(Protocol):
    """An object with ``set_epoch``."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, numbered from 0."""
        ...


def _ranges(start: int, stop: int) -> Iterator[list[int]]:
    for first in range(start, stop, _BLOCK):
        yield list(range(first, min(first + _BLOCK, stop)))


class ResumableSampler(Sampler[int], ABC):
    """Base of samplers that can start a pass at a later batch.

    In your own loop, ``start_iter`` skips the first ``start_iter * batch_size`` samples of each
    pass until you set it again. A trainer leaves it at 0 and uses positions.

    Args:
        batch_size: samples per batch.

    Attributes:
        epoch: the epoch of the next pass, from 0.
        start_iter: the number of the first batch of a pass in your own loop.
        run_seed: seed of the order in a run; affects the order of the built-in samplers.
    """

    epoch: int = 0
    run_seed: int = 0
    start_iter: int = 0

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self._batch_size = batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, numbered from 0."""
        self.epoch = epoch

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples of the epoch, starting at the batch ``start_iter``."""


@SAMPLER_REGISTRY.register
class ResumableRandomSampler(ResumableSampler):
    """All samples in a random order that depends only on the seeds and the epoch.

    Args:
        data_source: the data set, or any object of the same length.
        seed: seed of the order, in addition to that of the run.
        batch_size: samples per batch.
    """

    def __init__(self, data_source: Sized, seed: int = 0, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        self.data_source = data_source
        self.seed = seed

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the samples from a position, in lists."""
        key = rng.key("order", self.run_seed, self.seed, self.epoch)
        # Not len(self), because a derived class may repeat or truncate the order.
        length = len(self.data_source)
        return Permutation(length, key).blocks(min(start, length))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks(self.start_iter * self._batch_size))

    def __len__(self) -> int:
        return len(self.data_source)


@SAMPLER_REGISTRY.register
class ResumableSequentialSampler(ResumableSampler):
    """All samples in the order of the data set.

    Args:
        data_source: the data set, or any object of the same length.
        batch_size: samples per batch.
    """

    def __init__(self, data_source: Sized, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        self.data_source = data_source

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the samples from a position, in lists."""
        return _ranges(start, len(self.data_source))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks(self.start_iter * self._batch_size))

    def __len__(self) -> int:
        return len(self.data_source)


@SAMPLER_REGISTRY.register
class ResumableDistributedSampler(DistributedSampler[Any]):
    """The shard of one replica: positions ``rank``, ``rank + V``, ``rank + 2V`` … of the order.

    Shards are padded, or truncated with ``drop_last``, as in PyTorch's ``DistributedSampler``, but
    the order is that of Helios. ``start_iter`` counts batches, not samples.

    Args:
        dataset: the data set.
        num_replicas: V, the number of shards; the size of the process group by default.
        rank: number of this shard, from 0; the rank of the process by default.
        shuffle: whether the order is random.
        seed: seed of the order, in addition to that of the run.
        drop_last: whether to drop samples at the end instead of padding.
        batch_size: samples per batch.
    """

    run_seed: int = 0
    start_iter: int = 0

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch_size: int = 1,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._length = len(dataset)
        self._batch_size = batch_size

    def _measure(self) -> None:
        """Read the length again: PyTorch reads it only once, and a data set may grow."""
        length = len(cast(Sized, self.dataset))
        if length == self._length:
            return
        self._length = length
        is_cut = self.drop_last and length >= self.num_replicas
        whole = length - length % self.num_replicas if is_cut else length
        self.num_samples = -(-whole // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the shard from a position, in lists."""
        self._measure()
        position = self.rank + start * self.num_replicas
        end = min(self._length, self.total_size)
        base = min(position, end)
        for block in self.whole_blocks(base):
            picked = block[position - base : max(end - base, 0) : self.num_replicas]
            position += len(picked) * self.num_replicas
            base += len(block)
            if picked:
                yield picked
        if position < self.total_size:
            yield self._padding(position)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks(self.start_iter * self._batch_size))

    @property
    def whole_length(self) -> int:
        """The number of samples in all shards, without padding or truncation."""
        self._measure()
        return self._length

    def __len__(self) -> int:
        self._measure()
        return super().__len__()

    def whole_blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the order of all samples from a position, in lists."""
        self._measure()
        if not self.shuffle:
            return _ranges(start, self._length)
        key = rng.key("order", self.run_seed, self.seed, self.epoch)
        return Permutation(self._length, key).blocks(min(start, self._length))

    def _padding(self, position: int) -> list[int]:
        """Return the padding after the end of the order: its first samples again."""
        head = list(islice(chain.from_iterable(self.whole_blocks()), self.num_replicas))
        places = range(position, self.total_size, self.num_replicas)
        return [head[place % self._length] for place in places]


ResumableSamplerType: TypeAlias = ResumableSampler | ResumableDistributedSampler


def has_whole_order(sampler: object) -> TypeGuard[ResumableDistributedSampler]:
    """Return whether a distributed sampler can return the order of all samples.

    It cannot if a derived class determines its shard itself.
    """
    if not isinstance(sampler, ResumableDistributedSampler):
        return False
    kind, base = type(sampler), ResumableDistributedSampler
    return kind.blocks is base.blocks and kind.__iter__ is base.__iter__


def create_sampler(type_name: str, *args: Any, **kwargs: Any) -> ResumableSamplerType:
    """Create a registered sampler by the name of its class.

    Raises:
        KeyError: if the name is not registered.
    """
    sampler: ResumableSamplerType = SAMPLER_REGISTRY.get(type_name)(*args, **kwargs)
    return sampler

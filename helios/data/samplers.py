"""Samplers: the order of an epoch's samples, from any position.

The built-in ones are positional: they compute the samples from a position on, without stepping
through those before it (DESIGN R1). A sampler of a user derives from one of the two bases and
steps; :mod:`helios.data.order` runs either kind.
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
from helios.errors import ArgumentError

_BLOCK = 4_096

SAMPLER_REGISTRY = Registry("sampler")


@runtime_checkable
class HasEpoch(Protocol):
    """Anything that wants to know the epoch, numbered from 0."""

    def set_epoch(self, epoch: int) -> None:
        """Take the number of the epoch that the next pass belongs to."""
        ...


def _check_start(start_iter: int) -> int:
    if start_iter < 0:
        raise ArgumentError(
            f"start_iter must be the number of a batch, from 0, got {start_iter}; "
            "set it to the number of batches that the pass leaves out."
        )
    return start_iter


def _ranges(start: int, stop: int) -> Iterator[list[int]]:
    for first in range(start, stop, _BLOCK):
        yield list(range(first, min(first + _BLOCK, stop)))


class ResumableSampler(Sampler[int], ABC):
    """Base of samplers that can begin a pass at a later batch (API section 7, H11).

    A trainer leaves ``start_iter`` at 0, since it asks for positions, so that no later epoch loses
    its first batches (H12). For loops written by hand ``start_iter`` drops the first
    ``start_iter * batch_size`` samples of each pass until it is set again.

    Args:
        batch_size: samples of a batch.

    Attributes:
        epoch: the epoch, from 0, that the next pass belongs to.
        run_seed: seed of the run; enters the order of the built-in samplers (DESIGN R1).
    """

    epoch: int = 0
    run_seed: int = 0
    _start_iter: int = 0

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self._batch_size = batch_size

    @property
    def start_iter(self) -> int:
        """The number of the batch that a pass begins with."""
        return self._start_iter

    @start_iter.setter
    def start_iter(self, value: int) -> None:
        self._start_iter = _check_start(value)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, numbered from 0."""
        self.epoch = epoch

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples of the epoch, from ``start_iter`` on."""


@SAMPLER_REGISTRY.register
class ResumableRandomSampler(ResumableSampler):
    """All samples in an order that depends on the seeds and the epoch only (H11, H13).

    Args:
        data_source: the data set, or anything with its length.
        seed: seed of the order, beside the run's.
        batch_size: samples of a batch.
    """

    def __init__(self, data_source: Sized, seed: int = 0, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        self.data_source = data_source
        self.seed = seed

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the samples from a position on, in lists."""
        key = rng.key("order", self.run_seed, self.seed, self.epoch)
        # Not len(self): a derived class may repeat or cut the order, and say so in its length.
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
        data_source: the data set, or anything with its length.
        batch_size: samples of a batch.
    """

    def __init__(self, data_source: Sized, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        self.data_source = data_source

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the samples from a position on, in lists."""
        return _ranges(start, len(self.data_source))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks(self.start_iter * self._batch_size))

    def __len__(self) -> int:
        return len(self.data_source)


@SAMPLER_REGISTRY.register
class ResumableDistributedSampler(DistributedSampler[Any]):
    """The share of one replica: positions ``rank``, ``rank + V``, ``rank + 2V`` … of the order.

    Shares are padded, or cut with ``drop_last``, as PyTorch's sampler does; the order is ours.
    ``start_iter`` counts batches, not samples (H14).

    Args:
        dataset: the data set.
        num_replicas: V, the number of shares; that of the process group by default.
        rank: number of this share, from 0; that of the process by default.
        shuffle: whether the order is random.
        seed: seed of the order, beside the run's.
        drop_last: leave out the samples that do not fill all shares, instead of padding.
        batch_size: samples of a batch.
    """

    run_seed: int = 0
    _start_iter: int = 0

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
        """Count the data set again: PyTorch counts it once only, and it may grow."""
        length = len(cast(Sized, self.dataset))
        if length == self._length:
            return
        self._length = length
        is_cut = self.drop_last and length >= self.num_replicas
        whole = length - length % self.num_replicas if is_cut else length
        self.num_samples = -(-whole // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def start_iter(self) -> int:
        """The number of the batch that a pass begins with."""
        return self._start_iter

    @start_iter.setter
    def start_iter(self, value: int) -> None:
        self._start_iter = _check_start(value)

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the share from a position on, in lists."""
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
        """The number of samples of all shares together, without padding or cut."""
        self._measure()
        return self._length

    def __len__(self) -> int:
        self._measure()
        return super().__len__()

    def whole_blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the order that is shared, from a position of it on, in lists."""
        self._measure()
        if not self.shuffle:
            return _ranges(start, self._length)
        key = rng.key("order", self.run_seed, self.seed, self.epoch)
        return Permutation(self._length, key).blocks(min(start, self._length))

    def _padding(self, position: int) -> list[int]:
        """Return what stands behind the order's end: the order from its head again."""
        head = list(islice(chain.from_iterable(self.whole_blocks()), self.num_replicas))
        places = range(position, self.total_size, self.num_replicas)
        return [head[place % self._length] for place in places]


ResumableSamplerType: TypeAlias = ResumableSampler | ResumableDistributedSampler
PositionalSampler: TypeAlias = (
    ResumableRandomSampler | ResumableSequentialSampler | ResumableDistributedSampler
)


def is_positional(sampler: object) -> TypeGuard[PositionalSampler]:
    """Return whether ``blocks`` gives the order of a sampler.

    It does not where a derived class overrides ``__iter__`` only: the positions would be those of
    its base, and its own order would be lost without a word.
    """
    if not isinstance(sampler, PositionalSampler):
        return False
    classes = type(sampler).__mro__
    blocks, steps = (
        next(owner for owner in classes if name in vars(owner)) for name in ("blocks", "__iter__")
    )
    return issubclass(blocks, steps)


def has_whole_order(sampler: object) -> TypeGuard[ResumableDistributedSampler]:
    """Return whether a sampler of shares also gives the order that it shares.

    It does not where a derived class decides itself what its share is.
    """
    if not isinstance(sampler, ResumableDistributedSampler):
        return False
    kind, base = type(sampler), ResumableDistributedSampler
    return kind.blocks is base.blocks and kind.__iter__ is base.__iter__


def create_sampler(type_name: str, *args: Any, **kwargs: Any) -> ResumableSamplerType:
    """Create a registered sampler by the name of its class.

    Raises:
        KeyError: for a name that is not registered.
    """
    sampler: ResumableSamplerType = SAMPLER_REGISTRY.get(type_name)(*args, **kwargs)
    return sampler

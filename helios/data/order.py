"""The start of a pass over data, and the order of its samples.

A :class:`Position` defines where a pass starts and which random streams it uses. An :class:`Order`
returns the samples from there: computed from the position if the sampler supports it, otherwise by
iterating over the user's sampler (:mod:`helios.data.replayed_sampler`).
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, TypeAlias, TypeGuard, final, get_args

from helios.core import rng
from helios.data.mixture import MixtureSampler
from helios.data.samplers import (
    HasEpoch,
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
)
from helios.errors import StateError

PositionalSampler: TypeAlias = (
    ResumableRandomSampler
    | ResumableSequentialSampler
    | ResumableDistributedSampler
    | MixtureSampler
)


@dataclasses.dataclass(frozen=True)
class Position:
    """The start of a pass, and the random streams that it uses.

    Attributes:
        run_seed: seed of the run.
        purpose: name of the random streams of fetching; ``"fetch"`` in training.
        epoch: number of the pass, from 0.
        batch: number of its first batch.
        sample: position of that batch's first sample in the order.
        repeat: how often a user's own loop has run the same epoch before.
        is_by_hand: whether a user's own loop controls the sampler, which is then not changed.
        replica: the replica that batches are fetched for; does not affect the order.
    """

    run_seed: int = 0
    purpose: str = "fetch"
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    repeat: int = 0
    is_by_hand: bool = False
    replica: int = 0

    def fetch_keys(self) -> rng.KeySeries:
        """Return the keys from which batches are fetched and collated, by batch number."""
        suffix = (self.replica, self.repeat) if self.repeat else (self.replica,)
        return rng.KeySeries(self.run_seed, self.purpose, self.epoch, suffix=suffix)

    def worker_key(self, *more: int) -> int:
        """Return the key that workers are seeded from when they start."""
        return rng.key("workers", self.run_seed, self.epoch, *more)

    def order_key(self) -> int:
        """Return the key that a user's sampler is seeded from."""
        if self.repeat:
            return rng.key("order", self.run_seed, self.epoch, self.repeat)
        return rng.key("order", self.run_seed, self.epoch)


BlocksAndHead: TypeAlias = tuple[Iterator[list[Any]], Iterable[Any]]


class Order(ABC):
    """The order of a pass: samples, or lists of samples.

    Attributes:
        sampler: the sampler that determines it.
        yields_batches: whether its items are lists of samples.
    """

    sampler: Any
    yields_batches: bool = False

    @abstractmethod
    def blocks(self, position: Position) -> Iterator[list[Any]]:
        """Iterate over the items from a position, in lists of any length."""

    @abstractmethod
    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Like :meth:`blocks`, with the first items of the whole pass, for padding.

        Args:
            position: where to start.
            count: maximum number of items in the head.

        Returns:
            The blocks, and the head; read the head after the blocks are exhausted.
        """

    @property
    def length(self) -> int | None:
        """The number of items in a whole pass; ``None`` if the sampler has no length."""
        if not isinstance(self.sampler, Sized):
            return None
        try:
            return len(self.sampler)
        except TypeError:  # PyTorch's BatchSampler has a length only if its sampler has one
            return None

    def place_by_hand(self, batch_size: int) -> Position:
        """Return the position of a pass that a user's own loop starts."""
        if not isinstance(self.sampler, ResumableSamplerType):
            return Position(is_by_hand=True)
        batch = self.sampler.start_iter
        return Position(
            run_seed=self.sampler.run_seed,
            epoch=self.sampler.epoch,
            batch=batch,
            sample=batch * batch_size,
            is_by_hand=True,
        )

    def twin(self, dataset: Any) -> Order | None:
        """Return a copy that can be iterated without affecting this order.

        Args:
            dataset: the user's data set, which is not copied.

        Returns:
            The copy; ``None`` if the sampler has a state, or if it cannot be copied.
        """
        sampler = _copy_apart(self.sampler, dataset)
        return None if sampler is None else self._with(sampler)

    @property
    def has_state(self) -> bool:
        """Whether the sampler has a state of its own."""
        return False

    @abstractmethod
    def _with(self, sampler: Any) -> Order:
        """Return an order of the same kind over another sampler."""

    def leave(self, position: Position) -> None:
        """End a pass early, at the position of the batch that would have been next."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs besides a position; empty if there is none."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            StateError: if there is a state, but the sampler cannot load it.
        """
        if state_dict:
            raise StateError(
                f"{type(self.sampler).__name__} must load the sampler state of the checkpoint, "
                "but has no state_dict and load_state_dict. Use the sampler that the run was "
                "started with."
            )


def is_positional(sampler: object) -> TypeGuard[PositionalSampler]:
    """Return whether ``blocks`` returns the order of a sampler.

    It does not if a derived class overrides ``__iter__`` only: positions would refer to the order
    of its base class.
    """
    if not isinstance(sampler, PositionalSampler):
        return False
    classes = type(sampler).__mro__
    blocks, steps = (
        next(owner for owner in classes if name in vars(owner)) for name in ("blocks", "__iter__")
    )
    return issubclass(blocks, steps)


class PositionalOrder(Order):
    """The order of a built-in sampler, computed from the position."""

    sampler: PositionalSampler

    def __init__(self, sampler: PositionalSampler) -> None:
        self.sampler = sampler

    def blocks(self, position: Position) -> Iterator[list[int]]:
        """Iterate over the samples from a position, without those before it."""
        if not position.is_by_hand:
            prepare(self.sampler, position)
        return self._blocks_from(position.sample)

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Like :meth:`blocks`, with the first samples, which are computed when they are read."""
        return self.blocks(position), _first(self._blocks_from, count)

    def _blocks_from(self, start: int) -> Iterator[list[int]]:
        return self.sampler.blocks(start)

    def _with(self, sampler: Any) -> Order:
        return type(self)(sampler)


@final
class GlobalOrder(PositionalOrder):
    """The order of all samples of a sampler that returns the shard of one replica."""

    sampler: ResumableDistributedSampler

    @property
    def length(self) -> int:
        """The number of all samples."""
        return self.sampler.whole_length

    def _blocks_from(self, start: int) -> Iterator[list[int]]:
        return self.sampler.whole_blocks(start)


def _first(blocks: Callable[[int], Iterator[list[Any]]], count: int) -> Iterable[Any]:
    """Return the first items of an order, in the epoch that is current when they are read."""
    return islice(chain.from_iterable(blocks(0)), count) if count else ()


def _copy_apart(sampler: Any, dataset: Any) -> Any:
    """Return a copy of a sampler that shares only the data set; ``None`` if it cannot be copied."""
    if type(sampler) in get_args(PositionalSampler):
        return copy.copy(sampler)
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception:  # deepcopy of a user's object may raise anything
        return None


def prepare(sampler: Any, position: Position) -> None:
    """Set the epoch and the run's seed of a sampler; ``start_iter`` is replaced by positions."""
    if isinstance(sampler, (ResumableSampler, ResumableDistributedSampler)):
        sampler.run_seed = position.run_seed
        sampler.start_iter = 0
    if isinstance(sampler, HasEpoch):
        sampler.set_epoch(position.epoch)

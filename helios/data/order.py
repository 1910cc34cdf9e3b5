"""Where a pass over data begins, and who says what comes next.

A :class:`Position` names the beginning of a pass and the streams that it runs on. An :class:`Order`
gives the samples from there: by position where the sampler can (DESIGN R1), else by running the
user's sampler (:mod:`helios.data.replayed_sampler`).
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, TypeAlias, final

from helios.core import rng
from helios.data.samplers import (
    HasEpoch,
    PositionalSampler,
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
)
from helios.errors import StateError

_PURE = (ResumableRandomSampler, ResumableSequentialSampler, ResumableDistributedSampler)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a pass begins, and which streams it runs on.

    Attributes:
        run_seed: seed of the run.
        purpose: name of the fetching streams; ``"fetch"`` in training, another one elsewhere.
        epoch: number of the pass, from 0.
        batch: number of its first batch.
        sample: position of that batch's first sample in the order.
        repeat: how often a loop written by hand has run the same epoch before.
        is_by_hand: whether the sampler was set by the user, and is left as it is.
        replica: for whom batches are fetched; it enters no order.
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
        """Return the keys under which batches are fetched and collated, by number (DESIGN R2)."""
        suffix = (self.replica, self.repeat) if self.repeat else (self.replica,)
        return rng.KeySeries(self.run_seed, self.purpose, self.epoch, suffix=suffix)

    def order_key(self) -> int:
        """Return the key under which a user's sampler runs (DESIGN R1)."""
        if self.repeat:
            return rng.key("order", self.run_seed, self.epoch, self.repeat)
        return rng.key("order", self.run_seed, self.epoch)


BlocksAndHead: TypeAlias = tuple[Iterator[list[Any]], Iterable[Any]]


class Order(ABC):
    """What comes next in a pass: samples, or lists of them.

    Attributes:
        sampler: who decides it.
        yields_batches: whether its items are lists of samples.
    """

    sampler: Any
    yields_batches: bool = False

    @abstractmethod
    def blocks(self, position: Position) -> Iterator[list[Any]]:
        """Iterate over the items from a position on, in lists of any length."""

    @abstractmethod
    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Iterate likewise, and over the first items of the whole pass, for padding.

        Args:
            position: where to begin.
            count: the most items of the head.

        Returns:
            The blocks, and the head; read the head when the blocks have come to their end.
        """

    @property
    def length(self) -> int | None:
        """The number of items in a whole pass; ``None`` where the sampler does not say."""
        if not isinstance(self.sampler, Sized):
            return None
        try:
            return len(self.sampler)
        except TypeError:  # PyTorch's batch sampler has a length only if the grouped one has
            return None

    def place_by_hand(self, batch_size: int) -> Position:
        """Return where a pass begins that a user's own loop starts."""
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
        """Return an order of the same items that can be walked without moving this one.

        Args:
            dataset: the user's data set, which the twin shares.

        Returns:
            The twin; ``None`` for a sampler with state, and for one that cannot be copied.
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
        """Leave a pass before its end, at the position of the batch that would have come next."""

    def state_dict(self) -> dict[str, Any]:
        """Return what besides a position is needed to go on; empty where a position is enough."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned.

        Raises:
            StateError: if there is a state and nobody to take it.
        """
        if state_dict:
            raise StateError(
                f"{type(self.sampler).__name__} must take the sampler state of the checkpoint, "
                "but has no state_dict and load_state_dict. Use the sampler that the run was "
                "started with."
            )


@final
class PositionalOrder(Order):
    """The order of a built-in sampler: computed from the position."""

    def __init__(self, sampler: PositionalSampler) -> None:
        self.sampler: PositionalSampler = sampler

    def blocks(self, position: Position) -> Iterator[list[int]]:
        """Iterate over the samples from a position on; nothing before it is touched."""
        if not position.is_by_hand:
            prepare(self.sampler, position)
        return self.sampler.blocks(position.sample)

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Iterate likewise, and over the first samples, which are computed when they are read."""
        return self.blocks(position), _first(self.sampler.blocks, count)

    def _with(self, sampler: Any) -> Order:
        return PositionalOrder(sampler)


@final
class GlobalOrder(Order):
    """The order of all samples under a built-in sampler that gives the share of one replica."""

    def __init__(self, sampler: ResumableDistributedSampler) -> None:
        self.sampler: ResumableDistributedSampler = sampler

    @property
    def length(self) -> int:
        """The number of all samples."""
        return self.sampler.whole_length

    def blocks(self, position: Position) -> Iterator[list[int]]:
        """Iterate over the samples from a position on; nothing before it is touched."""
        prepare(self.sampler, position)
        return self.sampler.whole_blocks(position.sample)

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Iterate likewise, and over the first samples, which are computed when they are read."""
        return self.blocks(position), _first(self.sampler.whole_blocks, count)

    def _with(self, sampler: Any) -> Order:
        return GlobalOrder(sampler)


def _first(blocks: Callable[[int], Iterator[list[Any]]], count: int) -> Iterable[Any]:
    """Return the first items of an order; its epoch is the present one, whenever they are read."""
    return islice(chain.from_iterable(blocks(0)), count) if count else ()


def _copy_apart(sampler: Any, dataset: Any) -> Any:
    """Return a copy of a sampler that shares no more than the data set; ``None`` if it has none."""
    if type(sampler) in _PURE:
        return copy.copy(sampler)
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception:  # whatever an object that cannot be copied raises
        return None


def prepare(sampler: Any, position: Position) -> None:
    """Give a sampler the epoch and the run's seed; positions replace its start (H12)."""
    if isinstance(sampler, (ResumableSampler, ResumableDistributedSampler)):
        sampler.run_seed = position.run_seed
        sampler.start_iter = 0
    if isinstance(sampler, HasEpoch):
        sampler.set_epoch(position.epoch)

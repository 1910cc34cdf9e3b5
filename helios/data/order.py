"""Where a pass over data begins, and who says what comes next.

A :class:`Place` names the beginning of a pass and the streams that it runs on. An :class:`Order`
gives the samples from there: by position where the sampler can, else by running the user's sampler
on a stream of its own and leaving out what was drawn before (DESIGN R1).
"""

from __future__ import annotations

import copy
import dataclasses
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import BatchSampler

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
from helios.protocols import Stateful

_PURE = (ResumableRandomSampler, ResumableSequentialSampler, ResumableDistributedSampler)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_INDICES_AT_ONCE = 1_024
_BATCHES_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a pass begins, and which streams it runs on.

    Attributes:
        run_seed: seed of the run.
        purpose: name of the fetching streams; ``"fetch"`` in training, another one elsewhere.
        epoch: number of the pass, from 0.
        batch: number of its first batch.
        sample: position of that batch's first sample in the order.
        repeat: how often a loop written by hand has run the same epoch before.
        is_by_hand: whether the sampler was set by the user, and is left as it is.
    """

    run_seed: int = 0
    purpose: str = "fetch"
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    repeat: int = 0
    is_by_hand: bool = False

    def fetch_keys(self) -> rng.KeySeries:
        """Return the keys under which batches are fetched and collated, by number (DESIGN R2)."""
        suffix = (0, self.repeat) if self.repeat else (0,)
        return rng.KeySeries(self.run_seed, self.purpose, self.epoch, suffix=suffix)

    def order_key(self) -> int:
        """Return the key under which a user's sampler runs (DESIGN R1)."""
        if self.repeat:
            return rng.key("order", self.run_seed, self.epoch, self.repeat)
        return rng.key("order", self.run_seed, self.epoch)


class Order(ABC):
    """What comes next in a pass: samples, or lists of them.

    Attributes:
        sampler: who decides it.
        yields_batches: whether its items are lists of samples.
    """

    sampler: Any
    yields_batches: bool = False

    @abstractmethod
    def blocks(self, place: Place) -> Iterator[list[Any]]:
        """Iterate over the items from a place on, in lists of any length."""

    @property
    def length(self) -> int | None:
        """The number of items in a whole pass; ``None`` where the sampler does not say."""
        if not isinstance(self.sampler, Sized):
            return None
        try:
            return len(self.sampler)
        except TypeError:  # PyTorch's batch sampler has a length only if the grouped one has
            return None

    def place_by_hand(self, batch_size: int) -> Place:
        """Return where a pass begins that a user's own loop starts."""
        if not isinstance(self.sampler, ResumableSamplerType):
            return Place(is_by_hand=True)
        batch = self.sampler.start_iter
        return Place(
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

    @abstractmethod
    def _with(self, sampler: Any) -> Order:
        """Return an order of the same kind over another sampler."""

    def leave(self, place: Place) -> None:
        """Leave a pass before its end, at the place of the batch that would have come next."""

    def state_dict(self) -> dict[str, Any]:
        """Return what besides a place is needed to go on; empty where a place is enough."""
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

    def blocks(self, place: Place) -> Iterator[list[int]]:
        """Iterate over the samples from a position on; nothing before it is touched."""
        if not place.is_by_hand:
            _prepare(self.sampler, place)
        return self.sampler.blocks(place.sample)

    def _with(self, sampler: Any) -> Order:
        return PositionalOrder(sampler)


@final
class DrawnOrder(Order):
    """The order of a user's sampler or batch sampler, drawn ahead of its use.

    It runs on a stream of its own, so that training does not shift it and it does not shift
    training. A resume draws again what comes before the place, and fetches none of it. A sampler
    with ``state_dict`` is put back to the state that it had when the epoch began.
    """

    def __init__(self, sampler: Iterable[Any], *, yields_batches: bool = False) -> None:
        self.sampler: Iterable[Any] = sampler
        self.yields_batches = yields_batches
        self._stateful = next((p for p in _parts(sampler) if isinstance(p, Stateful)), None)
        self._epoch_state: dict[str, Any] | None = None
        self._is_loaded = False

    def blocks(self, place: Place) -> Iterator[list[Any]]:
        """Iterate over the items from a place on, in lists; lists of samples are copied."""
        self._settle(place)
        return self._draw(place)

    def twin(self, dataset: Any) -> Order | None:
        """Return an order to look aside with; ``None`` where the sampler's state would count."""
        holds_state = self._stateful is not None or any(map(_draws_alone, _parts(self.sampler)))
        return None if holds_state else super().twin(dataset)

    def _with(self, sampler: Any) -> Order:
        return DrawnOrder(sampler, yields_batches=self.yields_batches)

    def leave(self, place: Place) -> None:
        """Leave a pass before its end: a sampler with state stands where it was left.

        How far it was drawn ahead depends on blocks and workers, and must not show in the next
        epoch.
        """
        if self._stateful is None or self._epoch_state is None or place.is_by_hand:
            return
        self._stateful.load_state_dict(copy.deepcopy(self._epoch_state["state"]))
        with _PrivateStream(place.order_key()):
            self._open(place)
        self._remember(place.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the sampler had at the start of an epoch, and which epoch."""
        if self._stateful is None:
            return {}
        if self._epoch_state is None:
            self._remember(0)
        return dict(self._epoch_state or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; the next pass begins from it.

        Raises:
            StateError: if there is a state and nobody to take it, or the other way round.
        """
        if self._stateful is None:
            super().load_state_dict(state_dict)
            return
        if not state_dict:
            raise StateError(
                f"{type(self._stateful).__name__} has a state_dict, but the checkpoint holds no "
                "state of it. Use the sampler that the run was started with."
            )
        self._epoch_state = copy.deepcopy(state_dict)
        self._is_loaded = True

    def _settle(self, place: Place) -> None:
        """Bring a sampler with state to the start of the epoch, and remember it there."""
        if self._stateful is None:
            return
        if self._is_loaded and self._epoch_state is not None:
            self._is_loaded = False
            self._stateful.load_state_dict(copy.deepcopy(self._epoch_state["state"]))
            for epoch in range(self._epoch_state["epoch"], place.epoch):
                whole = dataclasses.replace(place, epoch=epoch, batch=0, sample=0)
                deque(self._draw(whole), maxlen=0)
        self._remember(place.epoch)

    def _remember(self, epoch: int) -> None:
        if self._stateful is not None:
            state = copy.deepcopy(self._stateful.state_dict())
            self._epoch_state = {"epoch": epoch, "state": state}

    def _draw(self, place: Place) -> Iterator[list[Any]]:
        stream = _PrivateStream(place.order_key())
        with stream:
            items = self._open(place)
        draw = self._draw_batches if self.yields_batches else self._draw_samples
        while True:
            with stream:
                block = draw(items)
            if not block:
                return
            yield block

    def _open(self, place: Place) -> Iterator[Any]:
        """Begin the sampler's pass, and leave out what was trained on."""
        if not place.is_by_hand:
            for part in _parts(self.sampler):
                _prepare(part, place)
        items = iter(self.sampler)
        if place.is_by_hand:
            return items
        skipped = place.batch if self.yields_batches else place.sample
        next(islice(items, skipped, skipped), None)
        return items

    def _draw_samples(self, items: Iterator[Any]) -> list[Any]:
        return list(islice(items, _INDICES_AT_ONCE))

    def _draw_batches(self, items: Iterator[Any]) -> list[Any]:
        # Copied one by one: a batch sampler may fill the same list again for its next batch.
        return [list(item) for item in islice(items, _BATCHES_AT_ONCE)]


def _parts(sampler: Any) -> list[Any]:
    """Return a sampler and, for PyTorch's batch sampler, the one that it groups."""
    return [sampler, sampler.sampler] if isinstance(sampler, BatchSampler) else [sampler]


def _draws_alone(sampler: Any) -> bool:
    """Whether a sampler holds a generator of its own, which each pass moves."""
    held = getattr(sampler, "__dict__", {})
    return any(isinstance(value, _GENERATORS) for value in held.values())


def _copy_apart(sampler: Any, dataset: Any) -> Any:
    """Return a copy of a sampler that shares no more than the data set; ``None`` if it has none."""
    if type(sampler) in _PURE:
        return copy.copy(sampler)
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception:  # whatever an object that cannot be copied raises
        return None


def _prepare(sampler: Any, place: Place) -> None:
    """Give a sampler the epoch and the run's seed; positions replace its start (H12)."""
    if isinstance(sampler, (ResumableSampler, ResumableDistributedSampler)):
        sampler.run_seed = place.run_seed
        sampler.start_iter = 0
    if isinstance(sampler, HasEpoch):
        sampler.set_epoch(place.epoch)


@final
class _PrivateStream:
    """Generators of one consumer: entered, they go on where they were left the last time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: dict[str, Any] | None = None
        self._found: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._found = rng.get_rng_state_dict()
        if self._own is None:
            rng.reseed(self._seed)
        else:
            rng.load_rng_state_dict(self._own)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._own = rng.get_rng_state_dict()
        rng.load_rng_state_dict(self._found)

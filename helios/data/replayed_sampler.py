"""Runs a user's sampler on its own random stream, and replays it when a run is resumed.

The indices before the position of a pass are drawn again and skipped, without fetching samples.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, final

from torch.utils.data import BatchSampler

from helios.core import rng
from helios.data.order import BlocksAndHead, Order, Position, prepare
from helios.data.sampler_changes import SamplerChanges
from helios.data.sampler_generators import OwnGenerators, find_generators
from helios.errors import StateError
from helios.protocols import Stateful

_LOGGER = logging.getLogger(__name__)
_INDICES_AT_ONCE = 1_024
_BATCHES_AT_ONCE = 64


@final
class ReplayedOrder(Order):
    """The order of a user's sampler or batch sampler, drawn ahead of its use.

    The sampler has its own random stream, so that it and training do not affect each other. A
    resume draws the indices before the position again, and skips them. A sampler with
    ``state_dict``, or with its own generators, is first restored to its state at the start of the
    epoch.
    """

    def __init__(self, sampler: Iterable[Any], *, yields_batches: bool = False) -> None:
        self.sampler: Iterable[Any] = sampler
        self.yields_batches = yields_batches
        self._stateful = _find_stateful(sampler)
        self._epoch_state: dict[str, Any] | None = None
        self._is_loaded = False
        self._changes = SamplerChanges(samplers_in(sampler))

    def blocks(self, position: Position) -> Iterator[list[Any]]:
        """Iterate over the items from a position, in lists; lists of samples are copied."""
        self._settle(position)
        return self._draw(position)

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Like :meth:`blocks`; the head is recorded in passing, as it cannot be drawn again."""
        if not count:
            return self.blocks(position), ()
        head: list[Any] = []
        start = position.batch if self.yields_batches else position.sample
        whole = self.blocks(dataclasses.replace(position, batch=0, sample=0))
        return _skip(whole, start, head, count), head

    @property
    def has_state(self) -> bool:
        """Whether the sampler has a state of its own."""
        return self._stateful is not None

    def twin(self, dataset: Any) -> Order | None:
        """Return a copy of the order; ``None`` if the sampler has a state."""
        return None if self._stateful is not None else super().twin(dataset)

    def _with(self, sampler: Any) -> Order:
        twin = ReplayedOrder(sampler, yields_batches=self.yields_batches)
        twin._changes = SamplerChanges(())  # Named for the order that training uses.
        return twin

    def leave(self, position: Position) -> None:
        """End a pass early, and set a sampler with state to its position.

        How far it was drawn ahead depends on blocks and workers, and must not affect the next
        epoch.
        """
        if self._stateful is None or self._epoch_state is None or position.is_by_hand:
            return
        self._stateful.load_state_dict(copy.deepcopy(self._epoch_state["state"]))
        with _PrivateStream(position.order_key()):
            self._open(position)
        self._remember(position.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state at the start of an epoch, and the number of the epoch."""
        if self._stateful is None:
            return {}
        return dict(self._epoch_state or _as_of(0, self._stateful))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, for the next pass.

        Raises:
            StateError: if there is a state, but the sampler cannot load it, or vice versa.
        """
        if self._stateful is None:
            super().load_state_dict(state_dict)
            return
        if not state_dict and isinstance(self._stateful, OwnGenerators):
            _LOGGER.warning(
                "The checkpoint contains no state of the generator that %s draws from, because "
                "earlier versions did not save it. From here on, the order of samples differs from "
                "that of an uninterrupted run.",
                type(self.sampler).__name__,
            )
            return
        if not state_dict:
            raise StateError(
                f"{type(self._stateful).__name__} has a state_dict, but the checkpoint contains no "
                "state of it. Use the sampler that the run was started with."
            )
        self._epoch_state = copy.deepcopy(state_dict)
        self._is_loaded = True

    def _settle(self, position: Position) -> None:
        """Set a sampler with state to the start of the epoch, and record its state."""
        if self._stateful is None:
            return
        if self._is_loaded and self._epoch_state is not None:
            self._is_loaded = False
            self._stateful.load_state_dict(copy.deepcopy(self._epoch_state["state"]))
            for epoch in range(self._epoch_state["epoch"], position.epoch):
                whole = dataclasses.replace(position, epoch=epoch, batch=0, sample=0)
                deque(self._draw(whole), maxlen=0)
        self._remember(position.epoch)

    def _remember(self, epoch: int) -> None:
        if self._stateful is not None:
            self._epoch_state = _as_of(epoch, self._stateful)

    def _draw(self, position: Position) -> Iterator[list[Any]]:
        stream = _PrivateStream(position.order_key())
        with stream:
            items = self._open(position)
        draw = self._draw_batches if self.yields_batches else self._draw_samples
        while True:
            with stream:
                block = draw(items)
            if not block:
                return
            yield block

    def _open(self, position: Position) -> Iterator[Any]:
        """Start the sampler's pass, and skip the samples before the position."""
        if not position.is_by_hand:
            self._changes.end_pass()
            for part in samplers_in(self.sampler):
                prepare(part, position)
            self._changes.begin_pass()
        items = iter(self.sampler)
        if position.is_by_hand:
            return items
        skipped = position.batch if self.yields_batches else position.sample
        next(islice(items, skipped, skipped), None)
        return items

    def _draw_samples(self, items: Iterator[Any]) -> list[Any]:
        return list(islice(items, _INDICES_AT_ONCE))

    def _draw_batches(self, items: Iterator[Any]) -> list[Any]:
        # Copied one by one, as a batch sampler may reuse the same list for its next batch.
        return [list(item) for item in islice(items, _BATCHES_AT_ONCE)]


def _as_of(epoch: int, sampler: Stateful) -> dict[str, Any]:
    """Return the state of a sampler at the start of an epoch."""
    return {"epoch": epoch, "state": copy.deepcopy(sampler.state_dict())}


def _skip(
    blocks: Iterator[list[Any]], start: int, head: list[Any], num_head: int
) -> Iterator[list[Any]]:
    """Iterate over the blocks from an item, and record the first items of the whole pass."""
    passed = 0
    for block in blocks:
        head += block[: num_head - len(head)]
        if passed + len(block) > start:
            yield block[max(start - passed, 0) :]
        passed += len(block)


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and, for PyTorch's ``BatchSampler``, its inner sampler."""
    return [sampler, sampler.sampler] if isinstance(sampler, BatchSampler) else [sampler]


def _find_stateful(sampler: Any) -> Stateful | None:
    """Return the part with a state: a sampler with ``state_dict``, or else its own generators."""
    for part in samplers_in(sampler):
        if isinstance(part, Stateful):
            return part
    generators = find_generators(sampler)
    return OwnGenerators(generators) if generators else None


@final
class _PrivateStream:
    """The random stream of one consumer, which continues each time the context is entered."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: dict[str, Any] | None = None
        self._found: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._found = rng.read_states()
        if self._own is None:
            rng.reseed(self._seed)
        else:
            rng.load_states(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = rng.read_states()
        rng.load_states(self._found)

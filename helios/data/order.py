"""The start of a pass over data, and the order of its samples.

A :class:`Position` defines where a pass starts and which random streams it uses. An :class:`Order`
returns the samples from there: computed from the position if the sampler supports it, otherwise by
iterating over the user's sampler on a random stream of its own. Then the indices before the
position are drawn again and skipped, without fetching samples, and the generators that a sampler
without ``state_dict`` draws from are saved. Any other state of it is lost at a resume, so the order
may differ from that of an uninterrupted run, and a warning names it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard, final, get_args

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset

from helios.core import rng
from helios.core.generators import (
    Generator,
    is_generator,
    kind_of_generator,
    load_generator,
    state_of_generator,
)
from helios.core.utils import Stateful, unsaved_of
from helios.data.fingerprint import length_of
from helios.data.mixture import MixtureSampler
from helios.data.samplers import (
    HasEpoch,
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSampler,
    ResumableSequentialSampler,
)
from helios.errors import StateError
from helios.state.digests import mark_of
from helios.state.values import LEAVES, PLAIN
from helios.storage.plain_objects import attributes_of

_LOGGER = logging.getLogger(__name__)
_DEEPEST = 8
_MANY = 100
_INDICES_AT_ONCE = 1_024
_BATCHES_AT_ONCE = 64

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
        replica: the replica that batches are fetched for; does not affect the order.
    """

    run_seed: int = 0
    purpose: str = "fetch"
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    replica: int = 0

    def fetch_keys(self) -> rng.KeySeries:
        """Return the keys from which batches are fetched and collated, by batch number."""
        return rng.KeySeries(self.run_seed, self.purpose, self.epoch, suffix=(self.replica,))

    def worker_key(self, *more: int) -> int:
        """Return the key that workers are seeded from when they start."""
        return rng.key("workers", self.run_seed, self.epoch, *more)

    def order_key(self) -> int:
        """Return the key that a user's sampler is seeded from."""
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
    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Return the items from a position, and the first ones of the whole pass, for padding.

        Args:
            position: where to start.
            count: maximum number of items in the head.

        Returns:
            The items, in lists of any length, and the head; read the head after the items are
            exhausted.
        """

    @property
    def length(self) -> int | None:
        """The number of items in a whole pass; ``None`` if the sampler has no length."""
        return length_of(self.sampler)

    def twin(self, dataset: Any) -> Order | None:
        """Return a copy that can be iterated without affecting this order.

        Args:
            dataset: the user's data set, which is not copied.

        Returns:
            The copy; ``None`` if the sampler has a state, or if it cannot be copied.
        """
        if type(self.sampler) in get_args(PositionalSampler):
            return self._with(copy.copy(self.sampler))
        try:
            sampler = copy.deepcopy(self.sampler, {id(dataset): dataset})
        except Exception:  # deepcopy of a user's object may raise anything
            return None
        return self._with(sampler)

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

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Return both, without the samples before them."""
        prepare(self.sampler, position)
        blocks = self._blocks_from(position.sample)
        return blocks, islice(chain.from_iterable(self._blocks_from(0)), count) if count else ()

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


def prepare(sampler: Any, position: Position) -> None:
    """Set the epoch and the run's seed of a sampler; ``start_iter`` is replaced by positions."""
    if isinstance(sampler, (ResumableSampler, ResumableDistributedSampler)):
        sampler.run_seed = position.run_seed
        sampler.start_iter = 0
    if isinstance(sampler, HasEpoch):
        sampler.set_epoch(position.epoch)


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
        self._changes = _SamplerChanges(samplers_in(sampler))

    def blocks(self, position: Position) -> Iterator[list[Any]]:
        """Iterate over the items from a position, in lists; lists of samples are copied."""
        self._settle(position)
        return self._draw(position)

    def blocks_and_head(self, position: Position, count: int) -> BlocksAndHead:
        """Return both; the head is recorded in passing, as it cannot be drawn again."""
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

    @property
    def holders(self) -> dict[str, Any]:
        """The objects whose state the order depends on: the sampler, or generators, by name."""
        if isinstance(self._stateful, OwnGenerators):
            return dict(self._stateful.generators)
        return {} if self._stateful is None else {type(self._stateful).__name__: self._stateful}

    def twin(self, dataset: Any) -> Order | None:
        """Return a copy of the order; ``None`` if the sampler has a state."""
        return None if self._stateful is not None else super().twin(dataset)

    def _with(self, sampler: Any) -> Order:
        twin = ReplayedOrder(sampler, yields_batches=self.yields_batches)
        twin._changes = _SamplerChanges(())  # Named for the order that training uses.
        return twin

    def leave(self, position: Position) -> None:
        """End a pass early, and set a sampler with state to its position.

        The number of indices drawn ahead depends on blocks and workers, and must not affect the
        next epoch.
        """
        if self._stateful is None or self._epoch_state is None:
            return
        self._stateful.load_state_dict(self.state_dict()["state"])
        with _PrivateStream(position.order_key()), self._watching():
            self._open(position)
        self._remember(position.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state at the start of an epoch, and the number of the epoch.

        Of generators, that is the state of those that the sampler has drawn from. Others belong to
        and are saved by other objects.
        """
        if self._stateful is None:
            return {}
        found = copy.deepcopy(self._epoch_state) or _as_of(0, self._stateful)
        if isinstance(self._stateful, OwnGenerators):
            drawn = self._stateful.drawn
            found["state"] = {path: part for path, part in found["state"].items() if path in drawn}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, for the next pass.

        Raises:
            StateError: if there is a state, but the sampler cannot load it, or vice versa.
        """
        if self._stateful is None:
            super().load_state_dict(state_dict)
            return
        if not state_dict and isinstance(self._stateful, OwnGenerators):
            # A migrated checkpoint has none.
            return
        if not state_dict:
            raise StateError(
                f"{type(self._stateful).__name__} has a state_dict, but the checkpoint contains no "
                "state of it. Use the sampler that the run was started with."
            )
        if isinstance(self._stateful, OwnGenerators):
            self._stateful.drawn |= state_dict["state"].keys()
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
        with stream, self._watching():
            items = self._open(position)
        size = _BATCHES_AT_ONCE if self.yields_batches else _INDICES_AT_ONCE
        # Copied one by one, as a batch sampler may reuse the same list for its next batch.
        copied = map(list, items) if self.yields_batches else items
        while True:
            with stream, self._watching():
                block = [*islice(copied, size)]
            if not block:
                return
            yield block

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Find the generators that the sampler draws from meanwhile."""
        own = self._stateful
        if not isinstance(own, OwnGenerators):
            yield
            return
        with own.watching():
            yield

    def _open(self, position: Position) -> Iterator[Any]:
        """Start the sampler's pass, and skip the samples before the position."""
        self._changes.end_pass()
        for part in samplers_in(self.sampler):
            prepare(part, position)
        self._changes.begin_pass()
        items = iter(self.sampler)
        skipped = position.batch if self.yields_batches else position.sample
        next(islice(items, skipped, skipped), None)
        return items


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


def find_generators(sampler: Any) -> dict[str, Generator]:
    """Return the generators that a sampler refers to, each by its shortest path.

    PyTorch's default generator, which the trainer seeds, and attributes that a sampler's class
    declares as ``unsaved`` are left out.
    """
    found: dict[str, Generator] = {}
    seen = {id(part): part for part in (sampler, torch.default_generator)}
    # Nearer objects come first, so that each has its shortest path.
    level = [("", sampler)]
    for _ in range(_DEEPEST + 1):
        parts = [
            (f"{path}{name}", value) for path, part in level for name, value in _members_of(part)
        ]
        level = []
        for path, value in parts:
            if type(value) in LEAVES or id(value) in seen:
                continue
            seen[id(value)] = value  # Kept, so that its address stays its own.
            if is_generator(value):
                found[path] = value
            else:
                level.append((f"{path}.", value))
    return found


def _members_of(part: Any) -> list[tuple[Any, Any]]:
    """Return what may hold a generator: members of short containers, attributes of objects."""
    if isinstance(part, dict | list | tuple):
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        return list(pairs) if len(part) < _MANY else []
    # A data set has generators of its own; those of networks and the like are saved by their owner.
    if isinstance(part, type | ModuleType | Dataset | Tensor | Stateful):
        return []
    return _saved_attributes_of(part)


def _saved_attributes_of(part: Any) -> list[tuple[str, Any]]:
    unsaved = unsaved_of(part)
    return [(name, value) for name, value in attributes_of(part).items() if name not in unsaved]


@final
class OwnGenerators:
    """The state of the generators that a sampler refers to.

    Args:
        generators: the generators by path.

    Attributes:
        generators: the same.
        drawn: the paths of those that the sampler has drawn from so far.
    """

    def __init__(self, generators: dict[str, Generator]) -> None:
        self.generators = generators
        self.drawn: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find the generators that are drawn from inside of the block."""
        before = self._marks()
        yield
        self.drawn |= {path for path, mark in self._marks().items() if mark != before[path]}

    def _marks(self) -> dict[str, bytes]:
        return {
            path: mark_of(state_of_generator(part))
            for path, part in self.generators.items()
            if path not in self.drawn
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator, by path."""
        return {
            path: (kind_of_generator(part), state_of_generator(part))
            for path, part in self.generators.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore each generator with a saved state of the same kind."""
        for path, generator in self.generators.items():
            kind, state = state_dict.get(path, (None, None))
            if kind == kind_of_generator(generator):
                load_generator(generator, state)


@final
class _SamplerChanges:
    """Compares the attributes of samplers at the beginning of the first pass with those after it.

    Later passes are not compared: a list may have millions of entries.

    Args:
        samplers: a sampler, and the one inside it; those with ``state_dict`` are left out.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._samplers = [part for part in samplers if not isinstance(part, Stateful)]
        self._before: list[dict[str, bytes]] | None = None

    def begin_pass(self) -> None:
        """Record the attributes, once the epoch was set."""
        if self._before is None:
            self._before = [_marks_of(sampler) for sampler in self._samplers]

    def end_pass(self) -> None:
        """Warn of what has changed since the first pass began."""
        for sampler, before in zip(self._samplers, self._before or (), strict=False):
            after = _marks_of(sampler)
            changed = [name for name in after if name in before and after[name] != before[name]]
            if changed:
                _LOGGER.warning(
                    "%s changes %s while it is iterated over, which no checkpoint holds: it has no "
                    "state_dict. If the order of samples depends on that, a resumed run has "
                    "another order. Compute the order in __iter__ from set_epoch(epoch), or write "
                    "state_dict and load_state_dict. If it does not depend on it, declare that in "
                    "the class: unsaved = (%s,).",
                    type(sampler).__name__,
                    ", ".join(changed),
                    ", ".join(f'"{name}"' for name in changed),
                )
        if self._before is not None:
            self._before = []


def _marks_of(sampler: Any) -> dict[str, bytes]:
    """Return what is equal for equal values, by attribute; objects are left out.

    Data sets and other samplers are objects, whose content may have been read ahead.
    """
    return {
        name: mark_of(value)
        for name, value in _saved_attributes_of(sampler)
        if isinstance(value, PLAIN)
    }


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

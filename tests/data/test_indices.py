"""The indices of a batch, computed anew: those that were fetched, and nothing is moved for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from helios.core import rng
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.samplers import (
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSampler,
)
from helios.data.source import Source
from tests.data.datasets import FETCH, Indices, Lone, draw, walk
from tests.data.test_order import Lazy, Remembering, Reusing

LENGTH = 11


def open_with(length: int = LENGTH, **options: Any) -> Source:
    loader, sampler = create_dataloader(Indices(length), **options)
    return open_source(loader, sampler, run_seed=7, purpose=FETCH)


class Backwards(ResumableRandomSampler):
    """A positional sampler of a user."""

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        order = [index for block in super().blocks(0) for index in block]
        yield order[::-1][start:]


class ByEpoch(ResumableSampler):
    """Its order follows from the epoch, by an attribute that it sets itself."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.order = list(range(length))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.order.sort(key=lambda index: (index * (epoch + 2)) % self.length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return self.length


_ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "dropped": lambda: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "single": lambda: {"batch_size": None, "shuffle": True},
    "shared": lambda: {
        "batch_size": 2,
        "sampler": ResumableDistributedSampler(Indices(LENGTH), 3, 1, shuffle=True, batch_size=2),
    },
    "backwards": lambda: {"batch_size": 3, "sampler": Backwards(Indices(LENGTH))},
    "drawn": lambda: {"batch_size": 4, "sampler": Lazy(LENGTH)},
    "by epoch": lambda: {"batch_size": 4, "sampler": ByEpoch(LENGTH)},
    "listed": lambda: {"batch_sampler": [[0, 1], [2, 3, 4], [5]]},
    "grouped": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), 4, False)},
    "in order": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(9)), 4, True)},
    "reusing": lambda: {"batch_sampler": Reusing()},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", _ORDERS)
def test_the_indices_are_those_that_are_fetched(case: str, num_workers: int) -> None:
    length = 101 if case == "reusing" else LENGTH
    source = open_with(length, num_workers=num_workers, **_ORDERS[case]())
    undisturbed = open_with(length, num_workers=num_workers, **_ORDERS[case]())
    for epoch in (0, 2):
        expected = [
            item.tolist() if isinstance(item, torch.Tensor) else item
            for item in walk(undisturbed, epoch)
        ]
        batches, sample, seen = Lone(source.batches(epoch)), 0, []
        for number, batch in enumerate(batches):
            seen.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            found = source.indices(epoch, batch=number, sample=sample)
            assert found == (seen[-1] if isinstance(seen[-1], list) else [seen[-1]])
            # Of an earlier epoch too: a window may reach over the end of one.
            source.indices(0)
            sample += batches.num_samples
        batches.close()
        assert seen == expected, "looking aside has changed the order"
        assert source.indices(epoch, batch=len(seen), sample=sample) is None


class Careless(ResumableRandomSampler):
    """A positional sampler that draws from all generators."""

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        draw(), np.random.rand()
        return super().blocks(start)


class Legacy(ResumableSampler):
    """Draws from NumPy's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(100).tolist())


_CARELESS: dict[str, Callable[[], dict[str, Any]]] = {
    "careless": lambda: {"sampler": Careless(Indices(101))},
    "legacy": lambda: {"sampler": Legacy()},
}


@pytest.mark.parametrize("case", [*_ORDERS, *_CARELESS])
def test_looking_aside_moves_no_generator_and_no_sampler(case: str) -> None:
    source = open_with(101, **{**_ORDERS, **_CARELESS}[case]())
    loader = source.loader
    sampler = loader.batches.order.sampler
    before = {name: repr(value) for name, value in getattr(sampler, "__dict__", {}).items()}
    rng.seed_rngs(3)
    states = rng.get_rng_state_dict(), np.random.get_state()
    source.indices(3, batch=1, sample=2)
    after = rng.get_rng_state_dict(), np.random.get_state()
    assert torch.equal(states[0]["torch"], after[0]["torch"])
    assert (states[0]["rand"], states[0]["numpy"]) == (after[0]["rand"], after[0]["numpy"])
    assert str(states[1]) == str(after[1])
    assert {name: repr(value) for name, value in getattr(sampler, "__dict__", {}).items()} == before
    assert not loader.keyed_dataset.dataset.counts.any()


class Settable(ResumableSampler):
    """Its order is a state that is set from outside, perhaps after the epoch has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [2, 0, 1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order = state_dict["order"]


class Alone(ResumableSampler):
    """Draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])


class Uncopyable(ResumableSampler):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.source = (index for index in range(3))

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Remembering(5),
        Settable,
        Uncopyable,
        lambda: Alone(torch.Generator()),
    ],
)
def test_what_cannot_be_known_is_not_told(make: Callable[[], ResumableSampler]) -> None:
    source = open_with(101, sampler=make())
    assert source.indices(0) is None

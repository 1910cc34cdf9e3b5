"""The indices of a batch, computed anew: those that were fetched, and nothing is moved for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from helios.core import rng
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.samplers import ResumableDistributedSampler
from helios.data.source import Source
from tests.data.datasets import FETCH, Indices, Lone, walk
from tests.data.test_order import Lazy, Reusing

LENGTH = 11


def open_with(length: int = LENGTH, **options: Any) -> Source:
    loader, sampler = create_dataloader(Indices(length), **options)
    return open_source(loader, sampler, run_seed=7, purpose=FETCH)


_ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "dropped": lambda: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "single": lambda: {"batch_size": None, "shuffle": True},
    "shared": lambda: {
        "batch_size": 2,
        "sampler": ResumableDistributedSampler(Indices(LENGTH), 3, 1, shuffle=True, batch_size=2),
    },
    "drawn": lambda: {"batch_size": 4, "sampler": Lazy(LENGTH)},
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


@pytest.mark.parametrize("case", _ORDERS)
def test_looking_aside_moves_no_generator_and_no_sampler(case: str) -> None:
    source = open_with(101, **_ORDERS[case]())
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

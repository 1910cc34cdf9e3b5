"""Mixtures: every source in its own epochs, by weight, the same for everybody, from anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import pytest

from helios.data import Mixture
from helios.data.mixture import BLOCK, MixtureSampler
from helios.errors import ArgumentError

LENGTHS = (7, 600, 70_000)
"""Sources whose orders are computed differently; the first is used up within a block."""


class Numbers(Sequence[int]):
    """The numbers 0, 1, 2 … without memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index


def mix(
    lengths: Sequence[int] = LENGTHS, weights: Sequence[float] = (2, 1.5, 0.5), **more: Any
) -> Mixture:
    pairs = zip(map(Numbers, lengths), weights, strict=False)
    return Mixture({f"s{n}": pair for n, pair in enumerate(pairs)}, **more)


def start(
    mixture: Mixture, position: int = 0, count: int = 3 * BLOCK, *, run_seed: int = 1, **more: Any
) -> list[int]:
    """Return samples from a position of the first epoch."""
    sampler = MixtureSampler(mixture, **more)
    sampler.run_seed = run_seed
    return list(islice(chain.from_iterable(sampler.blocks(position)), count))


def numbers_of(mixture: Mixture, samples: list[int], source: int) -> list[int]:
    """Return the numbers, in their source, of the samples of one source, in order."""
    found = map(mixture.locate, samples)
    return [number for name, number in found if name == mixture.names[source]]


@pytest.mark.shows("P56")
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_is_used_up_before_it_begins_again(shuffle: bool) -> None:
    mixture = mix((7, 600, 900), length=8_000)
    samples = start(mixture, count=8_000, shuffle=shuffle)
    for source, length in enumerate(mixture.lengths):
        numbers = numbers_of(mixture, samples, source)
        epochs = [numbers[i : i + length] for i in range(0, len(numbers) - length + 1, length)]
        assert epochs
        for epoch in epochs:
            assert sorted(epoch) == list(range(length))
        is_ordered = [epoch == sorted(epoch) for epoch in epochs]
        assert sum(is_ordered) < 2 if shuffle else all(is_ordered)
        assert len({tuple(epoch) for epoch in epochs}) > len(epochs) * 0.9 or not shuffle


@pytest.mark.shows("P56")
def test_the_sources_continue_over_the_epochs_of_a_run() -> None:
    whole, short = mix(length=3_000), mix(length=1_000)
    epochs = []
    sampler = MixtureSampler(short)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs += list(sampler)
    assert epochs == start(whole, count=3_000, run_seed=0)


@pytest.mark.shows("P56")
@pytest.mark.parametrize("position", [0, 1, 256, 10**12 + 77])
def test_any_position_gives_the_tail_of_the_order(position: int) -> None:
    mixture = mix(length=10**13)
    base = position - position % BLOCK
    assert (
        start(mixture, position) == start(mixture, base, 4 * BLOCK)[position - base :][: 3 * BLOCK]
    )
    assert start(mixture, position, 9) != start(mixture, position, 9, run_seed=2)
    assert start(mixture, position, 9) != start(mixture, position, 9, seed=2)


@pytest.mark.shows("P56")
@pytest.mark.parametrize(
    ("shuffle", "expected"), [(True, "fffe2e9b867e31e0"), (False, "a877a2494196ce35")]
)
def test_the_order_stays_what_it_is(shuffle: bool, expected: str) -> None:
    lengths = (1, 7, 511, 512, 513, 600, 2**16 + 1, 10**12)
    mixture = mix(lengths, (1, 2, 3, 4, 5, 6, 7, 8.5), length=10**13)
    found = sha256()
    for position in (0, 77, 10**6, 10**12 + 5):
        samples = start(mixture, position, 600, seed=3, shuffle=shuffle)
        found.update(repr(samples).encode())
    assert found.hexdigest()[:16] == expected


@pytest.mark.shows("P56")
@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (0.1,) * 10])
def test_after_each_block_shares_are_those_of_the_weights(weights: Sequence[float]) -> None:
    mixture = mix([50] * len(weights), weights, length=4 * BLOCK)
    assert math.isclose(sum(mixture.weights), 1)
    before = [0] * len(weights)
    for block in (*range(200), 10**10, 10**10 + 1):
        counts = mixture.count_before(block)
        assert sum(counts) == block * BLOCK
        for count, weight in zip(counts, mixture.weights, strict=True):
            assert abs(count - block * BLOCK * weight) < len(weights) + 1e-15 * block * BLOCK
        assert all(now >= then for now, then in zip(counts, before, strict=True))
        before = counts
    samples = start(mixture, 3 * BLOCK, BLOCK)
    expected = map(int.__sub__, mixture.count_before(4), mixture.count_before(3))
    assert [len(numbers_of(mixture, samples, n)) for n in range(len(weights))] == list(expected)


@pytest.mark.parametrize(
    ("sources", "rule"),
    [
        ({}, "at least one entry"),
        ({"a": (range(3), 0)}, "a positive weight"),
        ({"a": (range(3), math.inf)}, "a positive weight"),
        ({"a": (iter([1]), 1)}, "which a stream has not"),
        ({"a": range(3)}, "must be name: "),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: Any, rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule):
        Mixture(sources)

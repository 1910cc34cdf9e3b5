"""Keys, streams and the historical functions: what is drawn depends on the key and nothing else."""

from __future__ import annotations

import io
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.core import rng
from helios.errors import ArgumentTypeError, UsageError

_MASK32 = 0xFFFFFFFF
Numbers = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def draw(count: int = 4) -> Numbers:
    """Draw from torch, `random` and the package's generator."""
    generator = rng.get_default_numpy_rng().generator
    return (
        tuple(torch.rand(count).tolist()),
        tuple(random.random() for _ in range(count)),
        tuple(generator.random(count).tolist()),
    )


def leave_halves_behind() -> None:
    """Draw one normal by each generator that makes two, and one half of a 64-bit number."""
    random.gauss(0.0, 1.0)
    torch.randn(1)
    rng.get_default_numpy_rng().generator.integers(0, 1 << 32, dtype=np.uint32)


def draw_halves() -> tuple[float, float, int]:
    generator = rng.get_default_numpy_rng().generator
    number = generator.integers(0, 1 << 32, dtype=np.uint32)
    return random.gauss(0.0, 1.0), torch.randn(1).item(), int(number)


@pytest.mark.shows("H1")
def test_an_explicit_seed_wins_also_when_it_is_zero() -> None:
    rng.seed_rngs(0)
    zero = draw()
    rng.seed_rngs()
    assert all(a != b for a, b in zip(draw(), zero, strict=True))
    assert rng.DefaultNumpyRNG(0).state_dict() != rng.DefaultNumpyRNG().state_dict()


@pytest.mark.shows("H2")
def test_seeding_covers_torch_random_and_the_package() -> None:
    rng.seed_rngs(3)
    first = draw()
    draw()
    rng.seed_rngs(3)
    assert draw() == first
    expected = np.random.default_rng(3).random(4)
    assert first[2] == tuple(expected.tolist())


def draw_in_stream(seed: int) -> Numbers:
    with rng.stream(seed):
        return draw()


def test_the_global_generator_of_numpy_shares_no_words_with_that_of_torch() -> None:
    """Both take 32 bits of a key, for the same algorithm."""
    with rng.numpy_global_kept():
        for seed in (rng.key(6691, "train", 1, 0), (5 << 32) + 4, 1 << 63):
            rng.reseed(seed)
            words = torch.get_rng_state()[24:].view(torch.uint64)[:624].to(torch.int64)
            assert (seed & _MASK32) == words[0] != np.random.get_state()[1][0]


@pytest.mark.shows("P129")
def test_two_iterations_share_the_numbers_of_32_bits_as_often_as_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproducibility.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.,]+) \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for count, pairs, chance in rows:
        number = int(count.replace(",", ""))
        mean = number * (number - 1) / 2 / 2**32
        assert pairs == (f"{mean:,.0f}" if mean > 100 else f"{mean:.2g}")
        assert chance == f"{100 * -math.expm1(-mean):.1f}"
    keys = rng.KeySeries(rng.get_default_seed(), "train", suffix=(0,))
    seen: dict[int, int] = {}
    number = 1
    while seen.setdefault(keys.at(number) & _MASK32, number) == number:
        number += 1
    first = seen[keys.at(number) & _MASK32]
    assert f"the first such pair is iterations {first:,} and {number:,}." in page
    masks = []
    for place in (first, number):
        rng.reseed(keys.at(place))
        masks.append((torch.nn.functional.dropout(torch.ones(64)).tolist(), random.random()))
    assert masks[0][0] == masks[1][0]
    assert masks[0][1] != masks[1][1]


@pytest.mark.shows("H4")
def test_the_default_generator_is_asked_for_only_after_it_was_made() -> None:
    with pytest.raises(UsageError, match=r"does not exist yet.*rng\.seed_rngs"):
        rng.get_default_numpy_rng()
    rng.create_default_numpy_rng(2)
    generator = rng.get_default_numpy_rng().generator
    assert isinstance(generator.bit_generator, np.random.PCG64)
    assert generator.random() == np.random.default_rng(2).random()


@pytest.mark.shows("H4")
def test_the_state_of_a_numpy_generator_round_trips() -> None:
    """H4, in the middle of a 64-bit number too."""
    first = rng.DefaultNumpyRNG(7)
    first.generator.integers(0, 1 << 32, dtype=np.uint32)
    state = first.state_dict()
    expected = first.generator.integers(0, 1 << 32, 5, dtype=np.uint32).tolist()
    second = rng.DefaultNumpyRNG(8)
    second.load_state_dict(state)
    assert second.generator.integers(0, 1 << 32, 5, dtype=np.uint32).tolist() == expected


def test_a_generator_in_the_hand_of_a_user_follows_the_reseeding() -> None:
    """A data set may keep it: reseeding must not swap it for another one."""
    rng.create_default_numpy_rng()
    kept = rng.get_default_numpy_rng().generator
    rng.reseed(9)
    assert rng.get_default_numpy_rng().generator is kept
    with rng.stream(10):
        assert rng.get_default_numpy_rng().generator is kept
    assert rng.get_default_numpy_rng().generator is kept


def test_keys_are_the_same_in_all_versions() -> None:
    """A resumed run draws the numbers of the version that began it."""
    assert rng.key(6691, "fetch", 0, 1, 0) == 18061345850456867498
    assert rng.key(6691, "train", 1, 0) == 11498106863625448077
    assert rng.key(6691, "order", 0) == 3173662667667725675


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 0), (0, 1)),
        (("a", 1), ("a", "1")),
        (("ab",), ("a", "b")),
        (("a", 0), ("a", 0, 0)),
        ((1,), (-1,)),
        ((1 << 32, 0), (0, 1 << 32)),
    ],
)
def test_fields_are_typed_and_never_packed_or_added(one: tuple[Any], other: tuple[Any]) -> None:
    """Seed 1 in epoch 0 must not be seed 0 in epoch 1."""
    assert rng.key(*one) != rng.key(*other)


@pytest.mark.parametrize("field", [True, 1.0, np.int64(1)])
def test_a_field_of_another_type_is_refused_by_its_name(field: Any) -> None:
    """The text of NumPy's numbers differs between its versions, and True is no epoch."""
    with pytest.raises(ArgumentTypeError, match="takes int and str fields only") as caught:
        rng.key(1, field)
    assert type(field).__name__ in str(caught.value)


def test_reseeding_forgets_numbers_that_were_drawn_in_advance() -> None:
    """The second normal of a pair and the half of a 64-bit draw change bits."""
    rng.reseed(5)
    expected = draw_halves()
    rng.seed_rngs(6)
    leave_halves_behind()
    rng.reseed(5)
    assert draw_halves() == expected


def test_a_stream_draws_the_numbers_of_its_key_and_disturbs_nothing() -> None:
    """Evaluation restores the generators that it found."""
    rng.seed_rngs(1)
    expected = draw(), draw()
    rng.seed_rngs(1)
    first = draw()
    inside = draw_in_stream(5)
    assert (first, draw()) == expected
    rng.reseed(5)
    assert draw() == inside


@pytest.mark.shows("H6", "U10")
def test_the_state_passes_through_a_safe_load() -> None:
    """H6, H7: plain types and tensors only, integers of 128 bits included."""
    rng.seed_rngs(1)
    leave_halves_behind()
    payload = io.BytesIO()
    torch.save(rng.get_rng_state_dict(), payload)
    expected = draw_halves(), draw()
    payload.seek(0)
    rng.load_rng_state_dict(torch.load(payload, weights_only=True))
    assert (draw_halves(), draw()) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_reseeding_and_states_cover_the_accelerator() -> None:
    rng.create_default_numpy_rng()
    torch.zeros(1, device="cuda")
    rng.reseed(5)
    state = rng.get_rng_state_dict()
    first = torch.rand(4, device="cuda").tolist()
    torch.rand(4, device="cuda")
    rng.reseed(5)
    assert torch.rand(4, device="cuda").tolist() == first
    rng.load_rng_state_dict(state)
    assert torch.rand(4, device="cuda").tolist() == first


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ((), ()),
        ((6691, "train"), (0,)),
        ((), (1, "after")),
        (("\0'\"\n\\",), ("é", "{0}", "%d")),
    ],
)
def test_a_series_gives_the_keys_of_its_fields(
    prefix: tuple[int | str, ...], suffix: tuple[int | str, ...]
) -> None:
    series = rng.KeySeries(*prefix, suffix=suffix)
    for counter in (0, 1, 63, 64, 2, 10**12, -5):
        assert series.at(counter) == rng.key(*prefix, counter, *suffix)

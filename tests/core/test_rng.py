"""Keys, streams and the historical functions: what is drawn depends on the key and nothing else."""

from __future__ import annotations

import io
import itertools
import math
import random
import re
from collections.abc import Callable
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
def test_the_default_seed_is_the_historical_one() -> None:
    """H1."""
    assert rng.get_default_seed() == 6691
    rng.seed_rngs()
    by_default = draw()
    rng.seed_rngs(6691)
    assert draw() == by_default


@pytest.mark.shows("H1")
def test_an_explicit_seed_wins_also_when_it_is_zero() -> None:
    """H1."""
    rng.seed_rngs(0)
    zero = draw()
    rng.seed_rngs()
    assert all(a != b for a, b in zip(draw(), zero, strict=True))
    assert rng.DefaultNumpyRNG(0).state_dict() != rng.DefaultNumpyRNG().state_dict()


@pytest.mark.shows("H2")
def test_seeding_covers_torch_random_and_the_package() -> None:
    """H2."""
    rng.seed_rngs(3)
    first = draw()
    draw()
    rng.seed_rngs(3)
    assert draw() == first
    expected = np.random.default_rng(3).random(4)
    assert first[2] == tuple(expected.tolist())


def test_torch_can_be_left_out_of_the_seeding() -> None:
    """H8: a loader's worker seeds all but torch."""
    rng.seed_rngs(3)
    _, python, numpy = draw()
    torch.manual_seed(11)
    rng.seed_rngs(3, skip_torch=True)
    found = draw()
    torch.manual_seed(11)
    assert found == (tuple(torch.rand(4).tolist()), python, numpy)


def test_a_training_can_be_seeded_by_any_64_bits() -> None:
    """DESIGN R2: keys are unsigned numbers of 64 bits."""
    for seed in (0, 1, (1 << 63) + 1, (1 << 64) - 1):
        rng.seed_rngs(seed)
        rng.reseed(seed)
        first = draw()
        rng.reseed(seed)
        assert draw() == first


@pytest.mark.shows("H3")
@pytest.mark.parametrize(
    "act",
    [
        rng.seed_rngs,
        lambda: rng.load_rng_state_dict(rng.get_rng_state_dict()),
        lambda: draw_in_stream(5),
    ],
)
def test_the_legacy_state_of_numpy_is_left_untouched(act: Callable[[], Any]) -> None:
    """H3."""
    rng.create_default_numpy_rng()
    np.random.seed(4)
    np.random.normal()
    name, words, *rest = np.random.get_state()
    act()
    draw()
    found_name, found_words, *found_rest = np.random.get_state()
    assert (found_name, found_rest) == (name, rest)
    assert np.array_equal(found_words, words)


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


def test_a_small_seed_gives_the_numbers_that_people_know() -> None:
    with rng.numpy_global_kept():
        for act in (rng.seed_setup, rng.reseed):
            act(42)
            assert np.random.rand() == np.random.RandomState(42).rand()


def test_a_bit_generator_of_the_script_is_seeded_too() -> None:
    found = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with rng.numpy_global_kept():
            draws = []
            for seed in (5, 5, 6):
                rng.reseed(seed)
                draws.append((np.random.rand(), np.random.normal()))
            assert draws[0] == draws[1] != draws[2]
    finally:
        np.random.set_bit_generator(found)


def test_states_hold_the_global_generator_of_numpy_that_keys_seed() -> None:
    with rng.numpy_global_kept():
        rng.reseed(5)
        np.random.normal()
        state = rng.read_states()
        expected = np.random.normal(), np.random.rand(), draw()
        rng.reseed(6)
        rng.load_states(state)
        assert (np.random.normal(), np.random.rand(), draw()) == expected


@pytest.mark.shows("P129")
def test_two_iterations_share_the_numbers_of_32_bits_as_often_as_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproducibility.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.,]+) \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 5
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
    """H4."""
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


def test_a_generator_in_the_hand_of_a_user_draws_the_numbers_of_the_key() -> None:
    rng.create_default_numpy_rng()
    rng.reseed(9)
    expected = rng.get_default_numpy_rng().generator.random(4).tolist()
    rng.create_default_numpy_rng()
    kept = rng.get_default_numpy_rng().generator
    kept.random()
    rng.reseed(9)
    assert kept.random(4).tolist() == expected


def test_the_first_half_of_a_number_depends_on_the_key() -> None:
    def draw_half(key: int) -> int:
        rng.reseed(key)
        return int(rng.get_default_numpy_rng().generator.integers(1 << 32, dtype="uint32"))

    assert len({draw_half(rng.key(number)) for number in range(8)}) == 8


def test_a_key_is_an_unsigned_number_of_64_bits_that_depends_on_its_fields_only() -> None:
    """DESIGN R2."""
    keys = [rng.key(6691, "fetch", epoch, 0) for epoch in range(512)]
    assert keys == [rng.key(6691, "fetch", epoch, 0) for epoch in range(512)]
    assert all(0 <= found < 1 << 64 for found in keys)
    assert max(keys) > 1 << 63


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
        ((1, 23), (12, 3)),
        (("ab", "c"), ("a", "bc")),
        (("ab",), ("a", "b")),
        (("a",), ("a", 0)),
        (("a", 0), ("a", 0, 0)),
        (("a, 1",), ("a", 1)),
        (("a', 'b",), ("a", "b")),
        (("",), ()),
        ((1,), (-1,)),
        ((0,), (1 << 64,)),
        ((1 << 32, 0), (0, 1 << 32)),
        ((6691, "train", 1, 0), (6691, "fetch", 1, 0)),
    ],
)
def test_fields_are_typed_and_never_packed_or_added(one: tuple[Any], other: tuple[Any]) -> None:
    """DESIGN R2: seed 1 in epoch 0 must not be seed 0 in epoch 1."""
    assert rng.key(*one) != rng.key(*other)


def test_places_of_a_run_have_different_keys() -> None:
    """DESIGN R2: no two of 80,000 places share their numbers."""
    purposes = ("train", "fetch", "validation", "order")
    places = itertools.product(range(20), purposes, range(20), range(50))
    keys = {rng.key(*place) for place in places}
    assert len(keys) == 20 * 4 * 20 * 50


@pytest.mark.parametrize(
    "field", [True, 1.0, None, b"a", np.int64(1), np.str_("a"), ("a",), torch.tensor(1)]
)
def test_a_field_of_another_type_is_refused_by_its_name(field: Any) -> None:
    """The text of NumPy's numbers differs between its versions, and True is no epoch."""
    with pytest.raises(ArgumentTypeError, match="takes int and str fields only") as caught:
        rng.key(1, field)
    assert type(field).__name__ in str(caught.value)


def first_draws(keys: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the first number after reseeding with each key, by generator."""
    rows = []
    for found in keys:
        rng.reseed(found)
        rows.append([numbers[0] for numbers in draw(1)])
    return dict(zip(("torch", "random", "numpy"), np.array(rows).T, strict=True))


def test_neighbouring_places_draw_independent_uniform_numbers() -> None:
    """DESIGN R2: along iterations, along seeds, and between the three generators."""
    from scipy import stats

    for places in (
        [(6691, "train", number, 0) for number in range(2000)],
        [(number, "train", 1, 0) for number in range(2000)],
    ):
        columns = first_draws([rng.key(*place) for place in places])
        for numbers in columns.values():
            assert stats.kstest(numbers, "uniform").pvalue > 1e-3
            assert stats.pearsonr(numbers[1:], numbers[:-1]).pvalue > 1e-3
        for one, other in itertools.combinations(columns.values(), 2):
            assert stats.pearsonr(one, other).pvalue > 1e-3


def test_the_generator_of_numpy_is_uniform_within_one_key() -> None:
    """Its state is set by hand, so its numbers are looked at."""
    from scipy import stats

    rng.create_default_numpy_rng()
    for number in range(20):
        rng.reseed(rng.key("uniform", number))
        numbers = rng.get_default_numpy_rng().generator.random(2000)
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4


def test_reseeding_sets_all_generators_from_anywhere() -> None:
    """DESIGN R2, also where the package's generator was never made."""
    rng.reseed(5)
    first = draw()
    rng.seed_rngs(99)
    draw(7)
    rng.reseed(5)
    assert draw() == first
    rng.reseed(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_reseeding_forgets_numbers_that_were_drawn_in_advance() -> None:
    """DESIGN R2: the second normal of a pair and the half of a 64-bit draw change bits."""
    rng.reseed(5)
    expected = draw_halves()
    rng.seed_rngs(6)
    leave_halves_behind()
    rng.reseed(5)
    assert draw_halves() == expected


def test_a_stream_draws_the_numbers_of_its_key_and_disturbs_nothing() -> None:
    """DESIGN R2: evaluation restores the generators that it found."""
    rng.seed_rngs(1)
    expected = draw(), draw()
    rng.seed_rngs(1)
    first = draw()
    inside = draw_in_stream(5)
    assert (first, draw()) == expected
    rng.reseed(5)
    assert draw() == inside


def fail_after_a_draw() -> None:
    draw()
    raise ZeroDivisionError


def test_a_stream_restores_the_generators_also_after_an_error() -> None:
    rng.seed_rngs(1)
    expected = draw()
    rng.seed_rngs(1)
    with pytest.raises(ZeroDivisionError), rng.stream(5):
        fail_after_a_draw()
    assert draw() == expected


def test_a_stream_gives_back_numbers_that_were_drawn_in_advance() -> None:
    rng.seed_rngs(1)
    leave_halves_behind()
    expected = draw_halves()
    rng.seed_rngs(1)
    leave_halves_behind()
    with rng.stream(5):
        draw_halves()
    assert draw_halves() == expected


def test_streams_nest() -> None:
    rng.create_default_numpy_rng()
    with rng.stream(5):
        expected = draw(), draw()
    with rng.stream(5):
        first = draw()
        with rng.stream(6):
            draw()
        assert (first, draw()) == expected


def test_a_stream_leaves_no_generator_behind_that_was_not_there() -> None:
    """H4: what is asked for before a training starts stays an error."""
    with rng.stream(5):
        draw()
    with pytest.raises(UsageError, match="does not exist yet"):
        rng.get_default_numpy_rng()


def test_the_state_of_all_generators_round_trips() -> None:
    """H6."""
    rng.seed_rngs(1)
    leave_halves_behind()
    state = rng.get_rng_state_dict()
    expected = draw_halves(), draw()
    rng.seed_rngs(2)
    leave_halves_behind()
    rng.load_rng_state_dict(state)
    assert (draw_halves(), draw()) == expected


def test_the_state_has_the_historical_keys() -> None:
    """API section 15; H2: CUDA's only where CUDA is in use."""
    rng.create_default_numpy_rng()
    names = {"torch", "rand", "numpy"} | ({"cuda"} if torch.cuda.is_initialized() else set())
    assert set(rng.get_rng_state_dict()) == names


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


def test_a_state_with_lists_in_the_place_of_tuples_is_loaded() -> None:
    """Formats such as JSON know no tuples, and `random.setstate` takes nothing else."""
    rng.seed_rngs(1)
    state = rng.get_rng_state_dict()
    version, words, gauss = state["rand"]
    expected = draw()
    rng.load_rng_state_dict({**state, "rand": [version, list(words), gauss]})
    assert draw() == expected


def test_a_captured_state_does_not_follow_the_generators() -> None:
    """A snapshot is written while training goes on."""
    rng.seed_rngs(1)
    state = rng.get_rng_state_dict()
    expected = draw()
    rng.reseed(2)
    draw()
    rng.load_rng_state_dict(state)
    assert draw() == expected


def test_a_state_is_loaded_where_the_generator_of_the_package_was_not_made_yet() -> None:
    rng.seed_rngs(1)
    state = rng.get_rng_state_dict()
    expected = draw()
    rng._Default.numpy = None
    rng.load_rng_state_dict(state)
    assert draw() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_state_of_an_accelerator_is_left_alone_where_there_is_none() -> None:
    """A checkpoint of a GPU can be tested and read on a CPU."""
    rng.seed_rngs(1)
    state = rng.get_rng_state_dict() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    expected = draw()
    rng.load_rng_state_dict(state)
    assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_reseeding_and_states_cover_the_accelerator() -> None:
    """H2, H6."""
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_state_of_more_accelerators_than_there_are_is_loaded() -> None:
    """A run of one process goes on where fewer GPUs are visible; it uses the first one only."""
    rng.create_default_numpy_rng()
    torch.zeros(1, device="cuda")
    state = rng.get_rng_state_dict()
    expected = torch.rand(4, device="cuda").tolist()
    rng.load_rng_state_dict({**state, "cuda": state["cuda"] * 2})
    assert torch.rand(4, device="cuda").tolist() == expected


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ((), ()),
        ((6691, "train"), (0,)),
        ((6691, "train", 3), ("before", 5)),
        (("only",), ()),
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


def test_a_series_takes_plain_fields_only() -> None:
    with pytest.raises(ArgumentTypeError, match="int and str fields only"):
        rng.KeySeries(True)

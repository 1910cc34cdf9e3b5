"""The keyed permutation (DESIGN R1): a bijection, uniform over keys, and cut off anywhere."""

from __future__ import annotations

import random
import tracemalloc
from math import factorial

import numpy as np
import pytest
import torch

from helios.core import rng
from helios.data.permutation import Permutation, _Network
from helios.errors import ArgumentError

NUM_KEYS = 50_000
SMALL = range(7, 65)
REPRESENTATIVE = (7, 8, 16, 17, 33, 64)
LARGE = (65_537, 1_000_000)
SMALLEST_P = 1e-4
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def seeds():
    return np.array([rng.key("test", number) for number in range(NUM_KEYS)], dtype=np.uint64)


def network(length, seed=1, **options):
    return _Network([length], np.array([seed], dtype=np.uint64), **options)


def pairs_of_positions(length):
    """Rows (position, neighbour): all of a short range; of a long one a sample, with strides."""
    if length <= 64:
        return np.stack([np.arange(length - 1), np.arange(1, length)], axis=1)
    half = 1 << ((length - 1).bit_length() + 1) // 2
    first = np.arange(16) * (length // 16)
    return np.concatenate([np.stack([first, (first + d) % length], axis=1) for d in (1, half)])


def network_samples(length, seeds, **options):
    """Samples under every seed at each pair of positions; shape (pairs, 2, seeds)."""
    tested = _Network([length] * len(seeds), seeds, **options)
    pairs = pairs_of_positions(length)
    known = {p: tested.encipher(np.full(len(seeds), p)) for p in np.unique(pairs)}
    return np.array([[known[first], known[second]] for first, second in pairs])


def public_samples(length, num_keys):
    pairs = pairs_of_positions(length)
    return np.stack([Permutation(length, k).at(pairs) for k in range(num_keys)], axis=2)


def chi_square(counts, expected):
    from scipy.special import chdtrc

    return chdtrc(counts.size - 1, ((counts - expected) ** 2 / expected).sum())


def corrected_p(samples, length):
    """Smallest p over positions and pairs (two samples never equal), Bonferroni-corrected."""
    num_keys = samples.shape[2]
    fine, coarse = (length, length) if length <= 64 else (256, 16)
    widths = np.bincount(np.arange(length) * fine // length)
    wide = np.bincount(np.arange(length) * coarse // length).astype(float)
    shares = (np.outer(wide, wide) - np.diag(wide)).ravel() / (length * (length - 1.0))
    possible = shares > 0
    found = []
    for first, second in samples:
        for one in (first, second):
            counts = np.bincount(one * fine // length, minlength=fine)
            found.append(chi_square(counts, num_keys * widths / length))
        both = first * coarse // length * coarse + second * coarse // length
        counts = np.bincount(both, minlength=coarse**2)
        assert not counts[~possible].any()
        found.append(chi_square(counts[possible], num_keys * shares[possible]))
    return min(found) * len(found)


def assert_bijection(length, seed):
    tested = network(length, seed)
    positions = np.arange(length)
    samples = tested.encipher(positions)
    counts = np.bincount(samples, minlength=length)
    assert counts.size == length
    assert counts.min() == 1
    assert np.array_equal(tested.decipher(samples), positions)


@pytest.mark.parametrize("lengths", [range(1, 600), pytest.param(range(600, 2001), marks=FULL)])
def test_network_is_a_bijection_for_every_length_to_2000(lengths):
    for length in lengths:
        assert_bijection(length, seed=length)


@pytest.mark.parametrize("exponent", range(11, 21))
def test_network_is_a_bijection_at_powers_of_two_and_their_neighbours(exponent):
    for length in (2**exponent - 1, 2**exponent, 2**exponent + 1):
        assert_bijection(length, seed=exponent)


@pytest.mark.parametrize("length", [3, 5, 521, 65_537, 2**31 + 1, 2**32 + 1, 2**33 + 1, 2**62 + 1])
def test_single_positions_have_the_samples_that_they_have_among_many(length):
    positions = np.arange(min(length, 300))
    tested = network(length, seed=length)
    samples = tested.encipher(positions)
    for each in range(positions.size):
        assert tested.encipher(positions[each : each + 1]) == samples[each]
        assert tested.decipher(samples[each : each + 1]) == positions[each]


@pytest.mark.parametrize("length", [*REPRESENTATIVE, *LARGE])
def test_network_is_uniform_in_positions_and_pairs(length, seeds):
    assert corrected_p(network_samples(length, seeds), length) > SMALLEST_P


@pytest.mark.full
@pytest.mark.parametrize("length", [n for n in SMALL if n not in REPRESENTATIVE])
def test_network_is_uniform_in_positions_and_pairs_for_every_short_length(length, seeds):
    assert corrected_p(network_samples(length, seeds), length) > SMALLEST_P


def assert_all_orders_are_uniform(length, num_keys):
    positions = np.arange(length)
    digits = np.stack([Permutation(length, k).at(positions) for k in range(num_keys)])
    assert np.array_equal(np.sort(digits, axis=1), np.tile(positions, (num_keys, 1)))
    _, counts = np.unique(digits @ length**positions, return_counts=True)
    assert counts.size == factorial(length)
    assert chi_square(counts, num_keys / factorial(length)) > SMALLEST_P / 5


@pytest.mark.parametrize("length", range(2, 7))
def test_every_order_of_up_to_six_samples_is_equally_likely(length):
    assert_all_orders_are_uniform(length, num_keys=6_000)


@pytest.mark.parametrize("length", [7, 12, 33])
def test_order_of_a_short_range_is_uniform_in_positions_and_pairs(length):
    assert corrected_p(public_samples(length, num_keys=5_000), length) > SMALLEST_P


@pytest.mark.parametrize("length", [1, 2, 1_000, 65_536, 65_537])
def test_public_order_is_a_bijection_and_inverse_undoes_it(length):
    order = Permutation(length, key=11)
    positions = np.arange(length)
    samples = order.at(positions)
    assert np.array_equal(np.sort(samples), positions)
    assert np.array_equal(order.inverse(samples), positions)


GOLDEN = {
    (10, 1): [8, 0, 6, 1, 5],
    (1000, 18446744073709551615): [741, 393, 812, 70, 291],
    (65536, 2): [25024, 64906, 64802, 49341, 27505],
    (65537, 3): [26966, 32644, 46964, 31769, 24245],
    (1000000, 0): [498293, 634483, 23469, 497373, 208080],
    (4294967297, -4): [4064420793, 2231262705, 161338029, 1310666275, 417915707],
    (1000000000000, 5): [665696832268, 731181497894, 757827195714, 542519589035, 776473784190],
    (9223372036854775807, 6): [
        929522895183838740,
        8413106452799505373,
        3385329646528779914,
        3727493839728421146,
        6826685709117244277,
    ],
}


@pytest.mark.parametrize(("length", "key"), GOLDEN)
def test_order_is_the_one_that_earlier_versions_gave(length, key):
    positions = np.array([0, 1, 2, length // 2, length - 1])
    assert Permutation(length, key).at(positions).tolist() == GOLDEN[length, key]


@pytest.mark.parametrize("length", [1_000, 70_000])
def test_order_depends_on_length_and_key_only(length):
    before = list(Permutation(length, key=3).indices())
    rng.seed_rngs(99)
    random.random()
    torch.rand(1)
    assert list(Permutation(length, key=3).indices()) == before
    assert list(Permutation(length, key=4).indices()) != before
    assert list(Permutation(length + 1, key=3).indices(1)) != before
    shorter = [index for index in Permutation(length + 1, key=3).indices() if index < length]
    assert shorter != before


@pytest.mark.parametrize("length", [0, 1, 3, 4_096, 4_097, 65_536, 150_000])
def test_indices_from_any_start_are_the_tail_of_the_whole_order(length):
    order = Permutation(length, key=21)
    whole = order.at(np.arange(length)).tolist()
    borders = (0, 1, 4_095, 4_096, 4_097, 65_536, 69_631, 69_632, 69_633, 135_168, length // 2)
    for start in {*borders, length - 1, length}:
        if 0 <= start <= length:
            assert list(order.indices(start)) == whole[start:]
            assert [index for block in order.blocks(start) for index in block] == whole[start:]


@pytest.mark.parametrize("length", [65_536, 10**6, 10**12])
def test_first_index_needs_less_than_5_mib_at_any_length_and_position(length):
    tracemalloc.start()
    try:
        for start in (0, length * 9 // 10):
            next(Permutation(length, key=start).indices(start))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**20


def test_empty_permutation_is_legal():
    order = Permutation(0, key=1)
    nothing = np.array([], dtype=np.int64)
    assert list(order.indices()) == []
    assert order.at(nothing).size == order.inverse(nothing).size == 0


@pytest.mark.parametrize("length", [-1, 2**63])
def test_length_out_of_range_is_an_error(length):
    with pytest.raises(ArgumentError, match=r"Permutation\(length=...\)"):
        Permutation(length, key=1)

"""The keyed permutation: a bijection, uniform over keys, and cut off anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from helios.data.permutation import Permutation, _Network

FULL = pytest.mark.full


def network(length, seed=1, **options):
    return _Network([length], np.array([seed], dtype=np.uint64), **options)


def assert_bijection(length, seed):
    tested = network(length, seed)
    positions = np.arange(length)
    samples = tested.encipher(positions)
    counts = np.bincount(samples, minlength=length)
    assert counts.size == length
    assert counts.min() == 1
    assert np.array_equal(tested.decipher(samples), positions)


_BORDERS = [2**exponent + more for exponent in range(11, 18) for more in (-1, 0, 1)]


@pytest.mark.parametrize(
    "lengths", [[*range(1, 300), *_BORDERS], pytest.param(range(300, 2001), marks=FULL)]
)
def test_network_is_a_bijection_for_every_length_to_2000(lengths):
    for length in lengths:
        assert_bijection(length, seed=length)


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


@pytest.mark.parametrize("length", [0, 1, 3, 4_096, 4_097, 65_536, 150_000])
def test_indices_from_any_start_are_the_tail_of_the_whole_order(length):
    order = Permutation(length, key=21)
    whole = order.at(np.arange(length)).tolist()
    borders = (0, 1, 4_095, 4_096, 4_097, 65_536, 69_631, 69_632, 69_633, 135_168, length // 2)
    for start in {*borders, length - 1, length}:
        if 0 <= start <= length:
            assert list(order.indices(start)) == whole[start:]
            assert [index for block in order.blocks(start) for index in block] == whole[start:]

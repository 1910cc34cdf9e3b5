"""Packs that are planned from lengths: complete, full, and the same from any position."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios.data import Packed
from helios.data.packed import Piece
from tests.data.shards import SPLITS, Run, dealt, opener, order_of


def draw_lengths(seed: int, count: int, longest: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice((0, 1, chance.randint(0, longest))) for _ in range(count)]


def size_of(pack: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pack)


def tokens_of(packs: list[list[Piece]]) -> list[tuple[int, int]]:
    """Return every token as sample and place in it, in order of the packs."""
    return [(p.sample, t) for pack in packs for p in pack for t in range(p.start, p.stop)]


@pytest.mark.shows("P57")
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("seed", "count", "longest", "block"), [(1, 40, 9, 7), (2, 2_500, 30, 64), (3, 9, 90, 8)]
)
def test_each_token_is_in_one_pack(
    is_whole: bool, seed: int, count: int, longest: int, block: int
) -> None:
    lengths = draw_lengths(seed, count, longest)
    packed = Packed(lengths, block, is_whole=is_whole)
    packs = [packed[number] for number in range(len(packed))]
    row = [(sample, token) for sample, size in enumerate(lengths) for token in range(size)]
    assert all(0 < size_of(pack) <= block for pack in packs)
    assert all(piece.start < piece.stop for pack in packs for piece in pack)
    if is_whole:
        assert sorted(tokens_of(packs)) == row
        assert all(p.start % block == 0 for pack in packs for p in pack)
    else:
        assert tokens_of(packs) == row
        assert all(size_of(pack) == block for pack in packs[:-1])


@pytest.mark.shows("P57")
def test_whole_samples_fill_the_space_that_is_left() -> None:
    packed = Packed([6, 4, 5, 3, 2, 13, 0], 10, is_whole=True)
    assert [packed[number] for number in range(len(packed))] == [
        [Piece(5, 0, 10)],
        [Piece(0, 0, 6), Piece(1, 0, 4)],
        [Piece(2, 0, 5), Piece(3, 0, 3), Piece(4, 0, 2)],
        [Piece(5, 10, 13)],
    ]


@pytest.mark.shows("P57")
def test_any_pack_is_found_among_10_to_the_12() -> None:
    packed = Packed([10**15, 7, 10**15 + 1], 1_000)
    assert len(packed) == 2 * 10**12 + 1
    assert packed[10**12] == [Piece(1, 0, 7), Piece(2, 0, 993)]
    assert packed[10**12 - 1] == [Piece(0, 10**15 - 1_000, 10**15)]
    assert packed[-1] == [Piece(2, 10**15 - 7, 10**15 + 1)]


@pytest.mark.shows("P57")
@pytest.mark.parametrize("is_whole", [False, True])
def test_replicas_share_packs_on_any_number_of_processes(is_whole: bool) -> None:
    packed = Packed(draw_lengths(7, 90, 12), 16, is_whole=is_whole)
    options = {"batch_size": 3, "shuffle": True, "collate_fn": list}
    for num_processes, num_replicas in SPLITS:
        run = Run(opener(packed, **options), num_processes, num_replicas)
        expected = dealt(order_of(len(packed), 1, shuffle=True), num_replicas, 3)
        assert run.walk(1) == [[[packed[i] for i in batch] for batch in turn] for turn in expected]


@pytest.mark.shows("P57")
def test_other_lengths_and_options_have_another_fingerprint() -> None:
    lengths = [3, 4, 2]
    same = {
        Packed(kind(lengths), 5).fingerprint  # type: ignore[operator]
        for kind in (list, tuple, np.array, lambda sizes: np.array(sizes, np.uint16))
    }
    others = {
        Packed([3, 4, 3], 5).fingerprint,
        Packed(lengths, 6).fingerprint,
        Packed(lengths, 5, is_whole=True).fingerprint,
    }
    assert (len(same), len(others | same)) == (1, 4)

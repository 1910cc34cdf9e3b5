"""Blocks of a file that are hashed while it is written and verified when parts of it are read."""

from __future__ import annotations

import pytest

from helios.storage.digest import BLOCK_BYTES, BlockHasher, VerifiedBlocks

# Enough blocks that they are verified in threads, and a short one at the end.
SIZE = 40 * BLOCK_BYTES + 5


def digests_of(data: bytes, piece: int) -> list[str]:
    hasher = BlockHasher()
    for begin in range(0, len(data), piece):
        hasher.update(memoryview(data)[begin : begin + piece])
    return hasher.finish()


@pytest.mark.shows("P111")
@pytest.mark.parametrize("damaged", [[0], [17], [40], [39, 23, 31]])
def test_the_first_damaged_block_of_a_range_is_found(damaged: list[int]) -> None:
    data = bytearray(SIZE)
    digests = digests_of(bytes(data), SIZE)
    for number in damaged:
        data[min((number + 1) * BLOCK_BYTES, SIZE) - 1] ^= 1
    assert VerifiedBlocks(data, digests).find_damaged(0, SIZE) == min(damaged)
    blocks = VerifiedBlocks(data, digests)
    for number in range(41):
        begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, SIZE)
        assert blocks.find_damaged(begin, end) == (number if number in damaged else None)
        assert blocks.find_damaged(begin, begin) is None


@pytest.mark.shows("P111")
def test_a_block_that_was_verified_is_not_hashed_again() -> None:
    data = bytearray(SIZE)
    blocks = VerifiedBlocks(data, digests_of(bytes(data), SIZE))
    assert blocks.find_damaged(0, 20 * BLOCK_BYTES) is None
    data[5] ^= 1
    data[30 * BLOCK_BYTES] ^= 1
    assert blocks.find_damaged(0, SIZE) == 30

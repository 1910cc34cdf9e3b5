"""SHA-256 of each block of a file, so that a reader of some of its bytes can verify these alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BLOCK_BYTES = 1 << 18
_THREADS = 4
_MANY_BLOCKS = 16


class BlockHasher:
    """Hashes a file block by block while it is written.

    Attributes:
        digests: of the blocks that are complete, in hexadecimal digits.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._hash = hashlib.sha256()
        self._room = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Hash the next bytes."""
        while data:
            part, data = data[: self._room], data[self._room :]
            self._hash.update(part)
            self._room -= len(part)
            if not self._room:
                self._close()

    def _close(self) -> None:
        self.digests.append(self._hash.hexdigest())
        self._hash, self._room = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> list[str]:
        """Return the digests of all blocks; the last one may be short."""
        if self._room < BLOCK_BYTES:
            self._close()
        return self.digests


class VerifiedBlocks:
    """The blocks of a file that was written with their digests.

    Args:
        data: the bytes of the file, which may be mapped.
        digests: the digests of its blocks; none if there are none to compare with.
    """

    def __init__(self, data: Any, digests: Sequence[str]) -> None:
        self._data = data
        self._digests = digests
        self._verified: set[int] = set()

    def find_damaged(self, begin: int, end: int) -> int | None:
        """Return the first block that holds bytes of a range and is not as written, or ``None``.

        A block that was verified is not hashed again.
        """
        if not self._digests or begin >= end:
            return None
        blocks = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        unseen = [number for number in blocks if number not in self._verified]
        for number, is_good in zip(unseen, _map(self._is_good, unseen), strict=True):
            if not is_good:
                return number
            self._verified.add(number)
        return None

    def _is_good(self, number: int) -> bool:
        block = self._data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        return hashlib.sha256(block).hexdigest() == self._digests[number]


def _map(check: Callable[[int], bool], numbers: Sequence[int]) -> list[bool]:
    """Check numbers, many of them in threads: hashing a block does not hold the interpreter."""
    if len(numbers) < _MANY_BLOCKS:
        return [check(number) for number in numbers]
    with ThreadPoolExecutor(_THREADS, "helios-blocks") as pool:
        return list(pool.map(check, numbers))

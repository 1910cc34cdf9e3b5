"""Packs samples of different lengths, such as documents, into blocks of tokens.

Only lengths are read, so the plan is the same in every process and at every start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from operator import index as as_index
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from helios.errors import ArgumentError

_PLANNED_AT_ONCE = 1_024

_Ints = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A part of a sample.

    Attributes:
        sample: index of the sample.
        start: its first token in the pack, counted in the sample.
        stop: the token after its last one.
    """

    sample: int
    start: int
    stop: int


@final
class Packed(Dataset[list[Piece]]):
    """A plan: which parts of which samples each pack consists of.

    By default, samples are concatenated and cut every ``block`` tokens: all packs but the last are
    full. Only the ends of the samples are stored, and a pack is found by bisection.

    With ``is_whole``, only samples that are longer than a block are cut. The samples are planned
    1,024 at a time: the longest first, each into the fullest pack with enough space. This takes a
    few microseconds per sample, once, and packs are not full.

    Args:
        lengths: tokens of each sample; samples without tokens are in no pack.
        block: maximum number of tokens of a pack.
        is_whole: whether to keep samples whole.

    Attributes:
        block: as given.
        fingerprint: a hash of the lengths and options, which Helios compares at a resume if the
            data set has an attribute of this name.

    Raises:
        ArgumentError: if lengths are not integers of at least 0, if there are no tokens, or if
            ``block`` is not a positive int.

    Example:
        >>> packs = Packed([3, 4, 2], block=5)
        >>> len(packs), packs[1]
        (2, [Piece(sample=1, start=2, stop=4), Piece(sample=2, start=0, stop=2)])
    """

    def __init__(
        self, lengths: Sequence[int] | npt.NDArray[Any], block: int, *, is_whole: bool = False
    ) -> None:
        if type(block) is not int or block < 1:
            raise ArgumentError(
                f"Packed(block=...) must be a positive int, got {block!r}. Pass the maximum "
                "number of tokens of a pack."
            )
        sizes: _Ints = np.asarray(lengths)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not sizes.any() or sizes.min() < 0:
            raise ArgumentError(
                "Packed(lengths=...) must be integers of at least 0, one for each sample, with at "
                f"least one token, got {lengths!r}."
            )
        sizes = sizes.astype(np.int64, copy=False)
        self.block = block
        self.fingerprint = _hash(sizes, block, is_whole=is_whole)
        self._plan = _plan(sizes, block) if is_whole else None
        self._ends: _Ints = np.cumsum(sizes)

    def __len__(self) -> int:
        if self._plan is not None:
            return len(self._plan.firsts) - 1
        return -(-int(self._ends[-1]) // self.block)

    def __getitem__(self, index: int) -> list[Piece]:
        number = as_index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"There are {len(self)} packs, so there is no pack {index}.")
        return list(self._cut(number) if self._plan is None else self._plan.read(number))

    def _cut(self, number: int) -> Iterator[Piece]:
        """Yield the pieces between two cuts of the row of samples."""
        position, last = number * self.block, int(self._ends[-1])
        stop = min(position + self.block, last)
        sample = int(self._ends.searchsorted(position, side="right"))
        while position < stop:
            first = int(self._ends[sample - 1]) if sample else 0
            end = min(int(self._ends[sample]), stop)
            if end > position:
                yield Piece(sample, position - first, end - first)
            position, sample = end, sample + 1


class _Plan(NamedTuple):
    """Pieces of all packs in a row.

    Attributes:
        pieces: shape (number of pieces, 3).
        firsts: the first piece of each pack, and the number of pieces.
    """

    pieces: _Ints
    firsts: _Ints

    def read(self, number: int) -> Iterator[Piece]:
        """Return the pieces of a pack."""
        first, end = self.firsts[number : number + 2].tolist()
        return (Piece(*piece) for piece in self.pieces[first:end].tolist())


def _hash(sizes: _Ints, block: int, *, is_whole: bool) -> str:
    found = sha256(f"{block} {is_whole} ".encode())
    found.update(sizes.astype("<i8", copy=False).tobytes())
    return found.hexdigest()[:16]


def _plan(sizes: _Ints, block: int) -> _Plan:
    packs: list[list[Piece]] = []
    for first in range(0, len(sizes), _PLANNED_AT_ONCE):
        packs += _pack(
            _split(first, sizes[first : first + _PLANNED_AT_ONCE].tolist(), block), block
        )
    firsts = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    return _Plan(np.array(list(chain.from_iterable(packs)), dtype=np.int64), firsts)


def _split(first: int, sizes: list[int], block: int) -> list[Piece]:
    """Return the samples, of which those that are longer than a block are cut."""
    return [
        Piece(sample, start, min(start + block, size))
        for sample, size in enumerate(sizes, first)
        for start in range(0, size, block)
    ]


def _pack(pieces: list[Piece], block: int) -> list[list[Piece]]:
    """Put each piece, the longest first, into the fullest pack with enough space."""
    packs: list[list[Piece]] = []
    spaces: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start - piece.stop):
        size = piece.stop - piece.start
        place = bisect_left(spaces, (size, 0))
        if place < len(spaces):
            space, number = spaces.pop(place)
        else:
            space, number = block, len(packs)
            packs.append([])
        packs[number].append(piece)
        if space > size:
            insort(spaces, (space - size, number))
    return [sorted(pack) for pack in packs]

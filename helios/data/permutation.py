"""Computes the shuffled order of an epoch from a key, starting at any position.

Up to 65,536 samples, the order sorts keyed hashes of the positions. Above that, a Feistel network
enciphers the position itself, so 10^12 samples need no more memory than 10^5. It uses arithmetic
on unsigned integers only, so the result is the same in every version of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from helios.core import rng
from helios.errors import ArgumentError

_SORTED_LIMIT = 65_536
_ROW_LIMIT = 512
_FIRST_BLOCK = 4_096
_BLOCK = 65_536
_NUM_ROUNDS = 12
_MIN_BITS = 4
_MAX_LENGTH = (1 << 63) - 1

_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
# Arrays without dimensions: with scalars, operations on short arrays take twice as long.
_FACTOR_A, _FACTOR_B, _FACTOR_C = (
    np.array(factor, dtype=np.uint32) for factor in (0x7FEB352D, 0x846CA68B, 0x9E3779B1)
)
_SHIFT_A, _SHIFT_B = (np.array(shift, dtype=np.uint32) for shift in (15, 16))

_Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_Halves = npt.NDArray[np.uint32]
# Sizes, numbers of low bits, the shifts of the high and the low half, and the keys of all rounds.
_Parts: TypeAlias = tuple[_Words, _Words, _Halves, _Halves]


def _mix(words: _Words) -> _Words:
    """Mix 64-bit words in place by a bijection (the last step of SplitMix64)."""
    words ^= words >> np.uint64(30)
    words *= _MIX_A
    words ^= words >> np.uint64(27)
    words *= _MIX_B
    words ^= words >> np.uint64(31)
    return words


def _expand(seeds: _Words, count: int) -> _Words:
    """Derive ``count`` words from each seed; shape (count, number of seeds)."""
    steps = np.arange(1, count + 1, dtype=np.uint64)[:, None]
    return _mix(seeds + steps * _GOLDEN)


def _hashes(length: int, seeds: _Words) -> _Words:
    """Hash the positions 0 … length-1 under each seed; shape (number of seeds, length).

    Both keyed stages are bijections, so the hashes of one seed are distinct, and every sorting
    algorithm gives the same order.
    """
    first, second = _expand(seeds, 2)[:, :, None]
    positions = np.arange(length, dtype=np.uint64) * _GOLDEN
    words = _mix(positions + first)
    words ^= second
    return _mix(words)


@final
class _SortedOrder:
    """The permutation of a short range: the argsort of keyed hashes, computed when first used."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed

    @cached_property
    def _order(self) -> _Ints:
        hashes = _hashes(self._length, np.array([self._seed], dtype=np.uint64))
        order: _Ints = hashes[0].argsort().astype(np.int64, copy=False)
        return order

    def encipher(self, positions: _Ints) -> _Ints:
        return self._order[positions]

    def decipher(self, samples: _Ints) -> _Ints:
        places = np.empty_like(self._order)
        places[self._order] = np.arange(self._length)
        return places[samples]


@final
class _Network:
    """A cycle-walking Feistel network on the next power of two, with uneven halves for odd bits.

    Rounds change the high and the low half alternately. Values outside the range are enciphered
    again until they are inside, which keeps the map a bijection of the range (Black and Rogaway
    2002). Over 3 million keys, ranges up to 16 need twelve rounds to be uniform, and long ones
    half as many. Halves of one bit would need more, hence at least four bits.

    Args:
        lengths: the sizes of n ranges.
        seeds: the seed of each; shape (n,).
        rows: the range of each element; ``None`` if element i is of range i.
        num_rounds: rounds of the network.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seeds: _Words,
        rows: _Ints | None = None,
        *,
        num_rounds: int = _NUM_ROUNDS,
    ) -> None:
        bits = np.array([max(_MIN_BITS, (length - 1).bit_length()) for length in lengths])
        low_bits = bits - bits // 2
        words = _expand(seeds, num_rounds)
        halves = (words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32))
        parts: _Parts = (
            np.array(lengths, dtype=np.uint64),
            low_bits.astype(np.uint64),
            np.stack([32 - bits // 2, 32 - low_bits]).astype(np.uint32),
            np.stack(halves, axis=1),
        )
        self._num_rounds = num_rounds
        # The last dimension is that of elements; a single range has none.
        self._is_single = len(lengths) == 1
        if self._is_single:
            parts = _pick(parts, 0)
        elif rows is not None:
            parts = _pick(parts, rows)
        self._parts = parts

    def encipher(self, positions: _Ints) -> _Ints:
        return self._walk(positions, range(self._num_rounds))

    def decipher(self, samples: _Ints) -> _Ints:
        return self._walk(samples, range(self._num_rounds)[::-1])

    def _walk(self, values: _Ints, rounds: range) -> _Ints:
        found = _cross(values.astype(np.uint64), self._parts, rounds)
        stray = np.flatnonzero(found >= self._parts[0])
        while stray.size:
            parts = self._parts if self._is_single else _pick(self._parts, stray)
            moved = _cross(found[stray], parts, rounds)
            found[stray] = moved
            stray = stray[moved >= parts[0]]
        return found.astype(np.int64)


def _pick(parts: _Parts, places: Any) -> _Parts:
    lengths, low_bits, shifts, keys = parts
    return lengths[..., places], low_bits[..., places], shifts[..., places], keys[..., places]


def _cross(words: _Words, parts: _Parts, rounds: range) -> _Words:
    """Apply all rounds once; each round is its own inverse."""
    _, low_bits, (high_shift, low_shift), keys = parts
    high = (words >> low_bits).astype(np.uint32)
    low = (words & ((_ONE << low_bits) - _ONE)).astype(np.uint32)
    for number in rounds:
        first, second = keys[number]
        if number % 2:
            low ^= _round(high, first, second, low_shift)
        else:
            high ^= _round(low, first, second, high_shift)
    crossed: _Words = high.astype(np.uint64)
    crossed <<= low_bits
    crossed |= low
    return crossed


def _round(half: _Halves, first: _Halves, second: _Halves, shift: _Halves) -> _Halves:
    """Hash one half with two words; the result is the top bits, which depend on all others."""
    mixed: _Halves = half ^ first
    mixed *= _FACTOR_A
    mixed ^= mixed >> _SHIFT_A
    mixed += second
    mixed *= _FACTOR_B
    mixed ^= mixed >> _SHIFT_B
    mixed *= _FACTOR_C
    mixed >>= shift
    return mixed


@final
class Permutation:
    """A permutation of 0 … length-1 that depends only on the length and a key.

    Seeking takes the same time for any position, and memory does not grow with the length.

    Args:
        length: number of samples, from 0 to 2^63 - 1.
        key: any integer; different keys give unrelated orders.

    Raises:
        ArgumentError: if the length is outside that range (a ``ValueError``).
        ArgumentTypeError: if the length or the key is not a plain ``int`` (a ``TypeError``).

    Example:
        >>> sorted(Permutation(5, key=1).indices())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, key: int) -> None:
        seed = rng.key("permutation", length, key)
        if not 0 <= length <= _MAX_LENGTH:
            raise ArgumentError(
                f"Permutation(length=...) must be between 0 and 2**63 - 1, got {length}. "
                "Pass the number of samples of the data set."
            )
        self._length = length
        self._map: _SortedOrder | _Network
        if length <= _SORTED_LIMIT:
            self._map = _SortedOrder(length, seed)
        else:
            self._map = _Network([length], np.array([seed], dtype=np.uint64))

    def at(self, positions: _Ints) -> _Ints:
        """Return the samples at the given positions.

        Args:
            positions: integers from 0 to length-1, of any shape.

        Returns:
            The indices of the samples, int64, in the shape of ``positions``.

        Raises:
            ArgumentError: if a position is outside the range.
        """
        self._check("at(positions)", positions)
        return self._map.encipher(positions.ravel()).reshape(positions.shape)

    def inverse(self, samples: _Ints) -> _Ints:
        """Return the positions of the given samples; the inverse of :meth:`at`.

        Raises:
            ArgumentError: if a sample is outside the range.
        """
        self._check("inverse(samples)", samples)
        return self._map.decipher(samples.ravel()).reshape(samples.shape)

    def indices(self, start: int = 0) -> Iterator[int]:
        """Iterate over the samples in order, from the position ``start``.

        Raises:
            ArgumentError: if the start is not between 0 and the length.
        """
        return chain.from_iterable(self.blocks(start))

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the same samples in lists, whose lengths may change in later versions.

        Raises:
            ArgumentError: if the start is not between 0 and the length.
        """
        if not 0 <= start <= self._length:
            raise ArgumentError(
                f"Permutation.blocks(start=...) must be between 0 and the length {self._length}, "
                f"got {start}. Pass a position in the order of the epoch."
            )
        return self._blocks(start)

    def _blocks(self, start: int) -> Iterator[list[int]]:
        size = _FIRST_BLOCK
        while start < self._length:
            stop = min(start + size, self._length)
            yield self._map.encipher(np.arange(start, stop, dtype=np.int64)).tolist()
            start, size = stop, _BLOCK

    def _check(self, name: str, values: _Ints) -> None:
        if values.size and not 0 <= values.min() <= values.max() < self._length:
            raise ArgumentError(
                f"Permutation.{name} must be between 0 and {self._length - 1}, "
                f"got {values.min()} … {values.max()}."
            )


def permute_under_keys(
    lengths: Sequence[int], keys: Sequence[int], rows: _Ints, positions: _Ints
) -> _Ints:
    """Return the samples at positions of several permutations at once.

    These are keyed permutations, too, but not those of :class:`Permutation`, whose cost for a
    single position of a range of 65,536 is that of sorting all of it.

    Args:
        lengths: size of the range of each permutation; positive.
        keys: the key of each permutation.
        rows: which permutation each element uses.
        positions: the position of each element; shape as ``rows``.
    """
    pairs = zip(lengths, keys, strict=True)
    seeds = np.array([rng.key("permutation", *pair) for pair in pairs], dtype=np.uint64)
    sizes, found = np.array(lengths), np.empty_like(positions)
    size_of = sizes[rows]
    long = np.flatnonzero(size_of > _ROW_LIMIT)
    if long.size:
        found[long] = _Network(lengths, seeds, rows[long]).encipher(positions[long])
    for length in {length for length in lengths if length <= _ROW_LIMIT}:
        orders = np.flatnonzero(sizes == length)
        here = np.flatnonzero(size_of == length)
        places = orders.searchsorted(rows[here])
        found[here] = _hashes(length, seeds[orders]).argsort(axis=1)[places, positions[here]]
    return found

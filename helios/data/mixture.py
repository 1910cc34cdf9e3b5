"""Several map-style data sets, mixed by weight; :class:`MixtureSampler` is their order.

Positions are counted over all epochs and divided into blocks. The weights decide how many samples
of each source the blocks up to any number contain, so that a position is found without those
before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sized
from fractions import Fraction
from itertools import accumulate, chain
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset

from helios.core import rng
from helios.data.permutation import permute_under_keys
from helios.data.samplers import ResumableSampler
from helios.errors import ArgumentError

BLOCK = 256
"""The number of positions that a key shuffles at once."""


@final
class Mixture(Dataset[Any]):
    """Map-style data sets that are mixed in a fixed proportion.

    Each source has its own epochs: when all its samples were used, it begins again, in another
    order if the data is shuffled. This continues over the epochs of the run, so a sample of a
    source occurs again only after all others. After each 256 samples of a run, the number of
    samples from a source differs from its share by less than the number of sources.

    Samples are numbered source by source, as in ``torch.utils.data.ConcatDataset``. The lengths of
    the sources are read once.

    Args:
        sources: data set and weight by name; the weights are positive, and need not sum to 1.
        length: samples of an epoch; by default those of all sources together.

    Attributes:
        names: names of the sources.
        datasets: the data sets.
        weights: their weights, which sum to 1.
        lengths: their numbers of samples.
        offsets: the index of the first sample of each source.

    Raises:
        ArgumentError: if there is no source, a name is not a string, a source is empty or not a
            map-style data set, a weight is not a positive finite number, or the length is invalid.

    Example:
        >>> mixture = Mixture({"a": ("xyz", 3), "b": (range(7), 1)})
        >>> len(mixture), mixture[4], mixture.locate(4), mixture.weights
        (10, 1, ('b', 1), (0.75, 0.25))
    """

    def __init__(
        self, sources: Mapping[str, tuple[Any, float]], *, length: int | None = None
    ) -> None:
        _check_sources(sources)
        self.names = tuple(sources)
        self.datasets: tuple[Any, ...] = tuple(data for data, _ in sources.values())
        parts = [Fraction(weight) for _, weight in sources.values()]
        # What is left for a source and all after it: shares of that are exact for any position.
        rests = list(accumulate(reversed(parts)))[::-1]
        self.weights = tuple(float(part / rests[0]) for part in parts)
        self._shares = tuple(part / rest for part, rest in zip(parts, rests, strict=True))
        self.lengths = tuple(map(len, self.datasets))
        self.offsets = (0, *accumulate(self.lengths[:-1]))
        self._num_samples = sum(self.lengths)
        if length is not None and (type(length) is not int or length < 1):
            raise ArgumentError(
                f"Mixture(length=...) must be a positive int or None, got {length!r}. Pass the "
                "samples of an epoch."
            )
        self._length = self._num_samples if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        source, number = self._find(index)
        return self.datasets[source][number]

    def locate(self, index: int) -> tuple[str, int]:
        """Return the name of a sample's source, and the sample's index in it.

        Raises:
            IndexError: if there is no such sample.
        """
        source, number = self._find(index)
        return self.names[source], number

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"A mixture of {self._num_samples} samples has no index {index}.")
        source = bisect_right(self.offsets, index) - 1
        return source, index - self.offsets[source]

    def describe(self) -> list[dict[str, Any]]:
        """Return name, weight and length of each source, in plain values."""
        sources = zip(self.names, self.weights, self.lengths, strict=True)
        return [{"name": n, "weight": weight, "length": size} for n, weight, size in sources]

    def count_before(self, block: int) -> list[int]:
        """Return how many samples of each source there are before a block of positions."""
        left, found = block * BLOCK, []
        for share in self._shares:
            # Rounded down, so that no count is smaller before a later block.
            count = left * share.numerator // share.denominator
            found.append(count)
            left -= count
        return found


@final
class MixtureSampler(ResumableSampler):
    """The order of a :class:`Mixture`: a key shuffles the sources within each block of positions.

    Args:
        mixture: the mixture.
        seed: seed of the order, in addition to that of the run.
        batch_size: samples per batch.
        shuffle: whether each source is shuffled; otherwise each is used in its own order.
    """

    def __init__(
        self, mixture: Mixture, seed: int = 0, batch_size: int = 1, *, shuffle: bool = True
    ) -> None:
        super().__init__(batch_size)
        self.mixture = mixture
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.mixture)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks(self.start_iter * self._batch_size))

    def blocks(self, start: int = 0) -> Iterator[list[int]]:
        """Iterate over the samples from a position of the epoch, in lists."""
        length = len(self.mixture)
        first = self.epoch * length
        position, end = first + min(start, length), first + length
        while position < end:
            number, within = divmod(position, BLOCK)
            found = self._block(number)[within : within + end - position]
            yield found
            position += len(found)

    def _block(self, number: int) -> list[int]:
        """Return the samples of one block of positions, which are counted over all epochs."""
        befores, afters = (self.mixture.count_before(each) for each in (number, number + 1))
        counts = [after - before for before, after in zip(befores, afters, strict=True)]
        key = rng.key("mixture", self.run_seed, self.seed, number)
        block = np.arange(BLOCK)
        places = permute_under_keys([len(block)], [key], np.zeros_like(block), block)
        # Sorted within a source, because one that is not shuffled is used in its own order.
        firsts = np.repeat(np.arange(len(counts)), counts) * BLOCK
        found = np.empty_like(block)
        found[np.sort(firsts + places) - firsts] = self._next(befores, counts)
        return cast(list[int], found.tolist())

    def _next(self, befores: list[int], counts: list[int]) -> npt.NDArray[np.int64]:
        """Return the samples that follow, source by source.

        Args:
            befores: samples of each source before them, in all its epochs.
            counts: how many of each source follow.
        """
        mixture = self.mixture
        lengths: list[int] = []
        keys: list[int] = []
        rows, positions = [], []
        for source, (before, count) in enumerate(zip(befores, counts, strict=True)):
            if not count:
                continue
            length = mixture.lengths[source]
            epoch, within = divmod(before, length)
            laps, numbers = np.divmod(np.arange(within, within + count), length)
            rows.append(laps + len(keys))
            positions.append(numbers)
            fields = ("order", self.run_seed, self.seed, "source", mixture.names[source])
            epochs = range(epoch, epoch + int(laps[-1]) + 1)
            keys += [rng.key(*fields, each) for each in epochs]
            lengths += [length] * len(epochs)
        found: npt.NDArray[np.int64] = np.concatenate(positions)
        if self.shuffle:
            found = permute_under_keys(lengths, keys, np.concatenate(rows), found)
        found += np.repeat(mixture.offsets, counts)
        return found


def _check_sources(sources: Mapping[str, tuple[Any, float]]) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise ArgumentError(
            "Mixture(sources=...) must be a dict {name: (data set, weight)} with at least one "
            f"entry, got {sources!r}."
        )
    for name, pair in sources.items():
        data, weight = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, 0)
        is_sized = isinstance(data, Sized) and not isinstance(data, IterableDataset) and len(data)
        is_weight = isinstance(weight, int | float) and 0 < weight < math.inf
        if not isinstance(name, str) or not is_sized or not is_weight:
            raise ArgumentError(
                "Mixture(sources=...) must be name: (data set, weight), with a data set of a "
                "length, which a stream has not, and a positive weight, got "
                f"{name!r}: {pair!r}."
            )

"""Training without data: a batch is a number, and everything else comes from the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, final

from helios.data.source import BatchIterator, Shard, Source
from helios.errors import ArgumentError

ENDLESS = "endless"
"""The length of a pass that never ends, in the description of the data."""


@final
class Steps:
    """Iterations without data, as in reinforcement learning or with random offsets into a file.

    Assign it to ``train_dataset`` of a data module. A batch is an ``int``: the number of the
    training step of a replica, which no other replica, iteration or epoch of the run has:
    ``(epoch * n + iteration) * num_replicas + replica``, all counted from 0. Random numbers from
    ``torch``, ``random`` and Helios' NumPy generator depend on the seed, the iteration and the
    replica, as with data.

    Args:
        n: iterations of an epoch; ``None`` for a single epoch without end. Then a run that counts
            epochs is an error, and numbers are repeated only if a hook ends the epoch.

    Raises:
        ArgumentError: if ``n`` is neither a positive int nor ``None``.

    Example:
        >>> list(Steps(3))
        [0, 1, 2]
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None and (type(n) is not int or n < 1):
            raise ArgumentError(
                f"Steps(n=...) must be a positive int or None, got {n!r}. Pass the iterations of "
                "an epoch, or omit it for a run that only counts steps."
            )
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return count() if self.n is None else iter(range(self.n))


@final
class StepsSource(Source):
    """The numbers of a :class:`Steps`.

    Args:
        steps: the number of iterations.
        share: the part of this process.

    Raises:
        ArgumentError: if it is not for training.
    """

    loader: Steps

    def __init__(self, steps: Steps, share: Shard) -> None:
        if not share.pads:
            raise ArgumentError(
                "Steps must be training data, but an evaluation uses it. Evaluate on a map-style "
                "data set, such as self.create_dataset(range(10))."
            )
        super().__init__()
        self.loader = steps
        self._share = share

    def _describe(self) -> dict[str, Any]:
        n = self.loader.n
        return {"dataset": "Steps", "length": ENDLESS if n is None else n}

    @property
    def is_endless(self) -> bool:
        """Whether the only epoch never ends."""
        return self.loader.n is None and self.limit is None

    def _start(self, epoch: int, batch: int, sample: int, *, reads_content: bool) -> BatchIterator:
        return _Numbers(self._share, self.loader.n, self._skipped.get(epoch), (epoch, batch))

    def _count_batches(self, batch: int, sample: int) -> int | None:
        return self.loader.n

    @property
    def _can_skip(self) -> bool:
        return True


@final
class _Numbers(BatchIterator):
    """One pass."""

    def __init__(
        self, share: Shard, n: int | None, skipped: frozenset[int] | None, at: tuple[int, int]
    ) -> None:
        epoch, batch = at
        self.num_samples = share.num_replicas
        self._block = share.block
        self._first = epoch * (n or 0)
        numbers = count(batch) if n is None else range(batch, n)
        left = iter(numbers) if skipped is None else (i for i in numbers if i not in skipped)
        self._batches: Iterator[int] = left
        self._before = batch
        self._following = next(left, None)

    def size(self, place: int) -> int:
        """Each batch is one number."""
        return 1

    def __next__(self) -> list[int]:
        batch = self._following
        if batch is None:
            raise StopIteration
        self._following = next(self._batches, None)
        self.is_last = self._following is None
        num_skipped = batch - self._before
        self.skipped = (num_skipped, num_skipped * self.num_samples)
        self._before = batch + 1
        start = (self._first + batch) * self.num_samples
        found = [start + replica for replica in self._block]
        self.indices = found
        return found

    def close(self) -> None:
        """End the pass."""
        self._following = None

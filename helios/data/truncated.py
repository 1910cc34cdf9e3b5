"""A source whose passes end after a number of batches, for quick trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from helios.data.interfaces import BatchIterator, Source


@final
class TruncatedSource(Source):
    """The first batches of each pass over another source.

    Args:
        source: the whole data.
        limit: maximum number of batches of a pass.
    """

    def __init__(self, source: Source, limit: int) -> None:
        self.name = source.name
        self.loader = source.loader
        self._source = source
        self._limit = limit

    @property
    def description(self) -> dict[str, Any]:
        """The description of the data, with the limit."""
        return {**self._source.description, "limit_batches": self._limit}

    @property
    def length(self) -> int | None:
        """As without a limit."""
        return self._source.length

    @property
    def pass_length(self) -> int | None:
        """As without a limit."""
        return self._source.pass_length

    @property
    def can_resume(self) -> bool:
        """As without a limit."""
        return self._source.can_resume

    @property
    def claimant(self) -> str | None:
        """As without a limit."""
        return self._source.claimant

    @property
    def claimed(self) -> tuple[object, ...]:
        """As without a limit."""
        return self._source.claimed

    @property
    def missing(self) -> dict[str, str]:
        """As without a limit."""
        return self._source.missing

    @property
    def level(self) -> str:
        """As without a limit."""
        return self._source.level

    @property
    def remedy(self) -> str:
        """As without a limit."""
        return self._source.remedy

    @property
    def whole(self) -> Source:
        """The data without a limit."""
        return self._source

    @property
    def state_is_per_replica(self) -> bool:
        """As without a limit."""
        return self._source.state_is_per_replica

    def join_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all replicas, as without a limit."""
        return self._source.join_states(states)

    @property
    def ends_together(self) -> bool:
        """As without a limit."""
        return self._source.ends_together

    @property
    def state_is_per_process(self) -> bool:
        """As without a limit."""
        return self._source.state_is_per_process

    def batches(
        self, epoch: int, *, batch: int = 0, sample: int = 0, is_noted: bool = False
    ) -> BatchIterator:
        """Start a pass; it is empty if it starts at or after the limit."""
        batches = self._source.batches(epoch, batch=batch, sample=sample, is_noted=is_noted)
        whole = self._source.num_batches(batch=batch, sample=sample)
        if whole is not None and whole <= self._limit:
            return batches
        num_skipped = self.count_skipped(epoch, self._limit) - self.count_skipped(epoch, batch)
        return _LimitedBatches(batches, self._limit - batch - num_skipped)

    def num_batches(self, *, batch: int = 0, sample: int = 0) -> int | None:
        """Return the batches of a whole pass that continues at a position, up to the limit.

        If the limit was lowered, batches before the position still count.
        """
        whole = self._source.num_batches(batch=batch, sample=sample)
        return None if whole is None else min(whole, max(self._limit, batch))

    def indices(self, epoch: int, *, batch: int = 0, sample: int = 0) -> list[Any] | None:
        """Return the indices of one batch's samples; ``None`` also after the limit."""
        if batch >= self._limit:
            return None
        return self._source.indices(epoch, batch=batch, sample=sample)

    def skip(self, places: Sequence[tuple[int, int]]) -> None:
        """Skip batches in all passes; they count towards the limit."""
        self._source.skip(places)

    def count_skipped(self, epoch: int, stop: int | None = None) -> int:
        """Return how many batches of an epoch are skipped, below a number and the limit."""
        end = self._limit if stop is None else min(self._limit, stop)
        return self._source.count_skipped(epoch, end)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole data."""
        return self._source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the whole data."""
        self._source.load_state_dict(state_dict)

    def close(self) -> None:
        """End persistent workers."""
        self._source.close()


@final
class _LimitedBatches(BatchIterator):
    """A pass that ends at the limit."""

    def __init__(self, batches: BatchIterator, num_left: int) -> None:
        self._batches = batches
        self._num_left = num_left

    @property
    def sizes(self) -> Sequence[int] | None:
        """As without a limit."""
        return self._batches.sizes

    @property
    def replay_length(self) -> int:
        """As without a limit."""
        return self._batches.replay_length

    def catch_up(self) -> Iterator[None]:
        """Read again what is before the position."""
        return self._batches.catch_up()

    def __next__(self) -> Any:
        if self._num_left <= 0:
            self.close()
            raise StopIteration
        batch = next(self._batches)
        self._num_left -= 1
        self.num_samples, self.indices = self._batches.num_samples, self._batches.indices
        self.skipped, self.contents = self._batches.skipped, self._batches.contents
        self.repeats = self._batches.repeats
        self.is_last = self._batches.is_last or self._num_left == 0
        return batch

    def close(self) -> None:
        """End the pass and workers that are not persistent."""
        self._num_left = 0
        self._batches.close()

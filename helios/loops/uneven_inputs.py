"""Ends a pass together if the data of the processes ends at different iterations."""

from __future__ import annotations

from typing import Any, final

from helios.data.source import BatchIterator
from helios.session import Session

_END = object()


@final
class EvenBatches(BatchIterator):
    """Ends the pass of all processes when the data of the first one ends.

    The remaining batches of the others are not used.

    Args:
        batches: those of this process.
        session: the run.
    """

    def __init__(self, batches: BatchIterator, session: Session) -> None:
        self._batches = batches
        self._session = session

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        has_ended, is_last = self._session.replicas.agree(batch is _END, self._batches.is_last)
        if has_ended:
            self.close()
            raise StopIteration
        self.num_samples, self.is_last = self._batches.num_samples, is_last
        self.indices, self.contents = self._batches.indices, self._batches.contents
        return batch

    def close(self) -> None:
        """End the pass and its workers."""
        self._batches.close()

"""Reads the content of a batch where it is fetched, so that the training process need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

from helios.data.keyed import KeyedDataset
from helios.storage.content_hash import Content, content_bytes, look_safely


class ReadBatch(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: the batch.
        content: what was read of it.
    """

    batch: Any
    content: Content


@final
class ReadingCollate:
    """Collates a batch in a worker, and reads its content if the key of the batch demands it.

    Args:
        collate: the user's function.
        dataset: the data set of the same worker, which gets the keys.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: KeyedDataset) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """Return the batch, with its content if demanded."""
        batch = self._collate(samples)
        if not self._dataset.reads_content:
            return batch
        content = look_safely(batch)
        return ReadBatch(batch, content._replace(data=content_bytes(content)))

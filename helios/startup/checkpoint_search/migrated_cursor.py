"""Where a run goes on that was begun with helios-ml, the earlier package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helios.checkpoint.record import Record
from helios.replicas.replicas import Replicas
from helios.state import Cursor

_LOGGER = logging.getLogger(__name__)


def find_cursor(record: Record, description: Mapping[str, Any], replicas: Replicas) -> Cursor:
    """Return where the next batch lies.

    A migrated checkpoint knows the number of that batch only. Its first sample is where batches of
    the present size have come to, and what follows is said.

    Args:
        record: the content of the checkpoint.
        description: that of the present data.
        replicas: the present ones, each of which takes a batch.
    """
    cursor = Cursor(**record.cursor)
    if not record.is_migrated:
        return cursor
    size = description.get("batch_size") or 1
    cursor = replace(cursor, sample=cursor.batch * size * replicas.num_replicas)
    _LOGGER.warning(
        "The run goes on from a checkpoint of helios-ml %s, with its weights, optimizers and "
        "counters, at batch %d of epoch %d. The order of samples continues under the new rule: it "
        "is not that of the old package, and neither are losses to the bit. From here on both are "
        "exact. The old file does not say how many processes trained it: the run now has %d %s.",
        record.migrated_from or "before 0.3",
        cursor.batch + 1,
        cursor.epoch + 1,
        replicas.num_replicas,
        "replica" if replicas.is_lone else "replicas",
    )
    return cursor

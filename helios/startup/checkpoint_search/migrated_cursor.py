"""Where a run continues that was started with helios-ml, the earlier package."""

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
    """Return the position of the next batch.

    A migrated checkpoint holds only the number of that batch. Its first sample follows from the
    current batch size, and the consequences are logged.

    Args:
        record: the content of the checkpoint.
        description: description of the current data.
        replicas: the current replicas, each of which gets a batch.
    """
    cursor = Cursor(**record.cursor)
    if record.migrated_from is None:
        return cursor
    size = description.get("batch_size") or 1
    cursor = replace(cursor, sample=cursor.batch * size * replicas.num_replicas)
    _LOGGER.warning(
        "The run resumes from a checkpoint of helios-ml %s, with its weights, optimizers and "
        "counters, at batch %d of epoch %d. The order of samples follows the new rule: it differs "
        "from that of the old package, and so do losses. From here on both are exactly "
        "reproducible. The old file does not say how many processes trained it: the run now has "
        "%d %s.",
        record.migrated_from or "before 0.3",
        cursor.batch + 1,
        cursor.epoch + 1,
        replicas.num_replicas,
        "replica" if replicas.has_single_replica else "replicas",
    )
    return cursor

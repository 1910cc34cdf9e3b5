"""The length of a run in optimizer steps, from its options and its data, before it has run."""

from __future__ import annotations

import math

from helios.counters import TrainingUnit
from helios.data.source import Source
from helios.schedule import Schedule


def count_steps_per_epoch(
    schedule: Schedule, source: Source, *, is_manual: bool = False
) -> int | None:
    """Return the optimizer steps of an epoch; ``None`` if unknown, or if epochs differ.

    Args:
        schedule: the options.
        source: the training data.
        is_manual: whether the model steps its optimizers itself, once for each batch.
    """
    length = _count_batches(source)
    if length is None or source.skipping_epochs:
        return None
    if schedule.unit is TrainingUnit.EPOCH:
        return _count_windows(schedule, length, is_manual=is_manual)
    # Windows go on in the next epoch.
    steps, rest = divmod(length, schedule.accumulation_steps)
    return None if rest else steps


def count_steps(schedule: Schedule, source: Source, *, is_manual: bool = False) -> int | None:
    """Return the optimizer steps of the whole run; ``None`` if unknown, or without a limit.

    Args:
        schedule: the options.
        source: the training data.
        is_manual: as in :func:`count_steps_per_epoch`.
    """
    if math.isinf(schedule.total_steps):
        return None
    total = int(schedule.total_steps)
    if schedule.unit is TrainingUnit.ITERATION:
        return total
    length = _count_batches(source)
    if length is None:
        return None
    steps = total * _count_windows(schedule, length, is_manual=is_manual)
    for epoch in source.skipping_epochs:
        if epoch < total:
            left = length - source.count_skipped(epoch)
            steps -= _count_windows(schedule, length, is_manual=is_manual)
            steps += _count_windows(schedule, left, is_manual=is_manual)
    return steps if schedule.max_steps is None else min(steps, schedule.max_steps)


def _count_batches(source: Source) -> int | None:
    return source.num_batches() if source.ends_together else None


def _count_windows(schedule: Schedule, length: int, *, is_manual: bool) -> int:
    """Return the windows of an epoch, by epochs: the last one ends with it."""
    return -(-length // (1 if is_manual else schedule.accumulation_steps))

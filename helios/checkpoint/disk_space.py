"""Checks before the first step whether the checkpoints of a run fit on the disk.

Otherwise the first save that fails would cost all training up to that point.
"""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

from helios.checkpoint.options import CheckpointStore
from helios.text import size_text

_LOGGER = logging.getLogger(__name__)


def count_kept(options: CheckpointStore, num_saves: float) -> float:
    """Return the maximum number of checkpoints of a run on the disk at one time.

    Args:
        options: the retention rules.
        num_saves: number of saves to come that ``chkpt_frequency`` requires; infinity if unknown.
    """
    if options.keeps_all:
        return num_saves
    if options.keep_every is not None:
        # Its number grows with the run.
        return num_saves / options.keep_every + _count_others(options)
    if options.keep_best is not None:
        # Its validations save too.
        num_saves += options.keep_best.count
    return min(num_saves, _count_others(options))


def _count_others(options: CheckpointStore) -> int:
    best = 0 if options.keep_best is None else options.keep_best.count
    # An old one is deleted after the new one is written; the one resumed from stays, too.
    return (options.keep_last or 1) + best + 2


def warn_if_too_large(
    folder: Path, *, num_bytes: int, num_saves: float, options: CheckpointStore
) -> None:
    """Warn if the disk is too small for the checkpoints to come.

    Args:
        folder: folder of the checkpoints; need not exist yet.
        num_bytes: the estimated size of one.
        num_saves: number of saves to come; infinity if unknown.
        options: the retention rules.
    """
    free = _free_bytes(folder)
    if free is None:
        return
    if num_bytes > free:
        _LOGGER.warning(
            "Not even one checkpoint will fit into %s: one takes about %s, and %s are free. Make "
            "room, or set chkpt_root to another disk.",
            folder,
            size_text(num_bytes),
            size_text(free),
        )
        return
    kept = count_kept(options, num_saves)
    if num_bytes * kept > free and math.isfinite(kept):
        _LOGGER.warning(
            "The checkpoints of this run will not fit into %s: up to %d of about %s each, and %s "
            "are free. %s",
            folder,
            math.ceil(kept),
            size_text(num_bytes),
            size_text(free),
            _advise(options),
        )


def _advise(options: CheckpointStore) -> str:
    """Return a remedy, depending on the rules."""
    if options.keeps_all:
        return "Keep fewer, with store=CheckpointStore(keep_last=3), save less often, or make room."
    ways = []
    if options.keep_every is not None:
        ways.append(f"more than {options.keep_every} in keep_every")
    if options.keep_best is not None and options.keep_best.count > 1:
        ways.append(f"less than {options.keep_best.count} in keep_best")
    if options.keep_last is not None and options.keep_last > 1:
        ways.append(f"less than {options.keep_last} in keep_last")
    if not ways:
        return "The rules keep as few as they can: make room, or set chkpt_root to another disk."
    return f"Keep fewer, with {' or '.join(ways)} of CheckpointStore, or make room."


def _free_bytes(folder: Path) -> int | None:
    present = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    try:
        return None if present is None else shutil.disk_usage(present).free
    except OSError:
        # The save itself will report what is wrong with the disk.
        return None

"""What defines a run, what ends it, and how both compare with what its checkpoint holds.

A difference is found before the first step, and needs the user's allowance, which is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded
from helios.engines.engine import Engine
from helios.errors import RunMismatchError
from helios.schedule import Schedule, find_limit, is_limit
from helios.startup.options.trainer_options import RunOptions
from helios.state import Cursor, TrainingState

_LOGGER = logging.getLogger(__name__)

_RESTARTING = ("dataset", "length", "shuffle", "seed", "sampler", "random_seed", "is_distributed")


_UNCOUNTED = ("length", None)
"""What is stored of a loader whose samples nobody has counted."""

_OF_DATA = (
    *("dataset", "length", "batch_size", "shuffle", "drop_last", "seed", "sampler"),
    *("limit_batches", "is_distributed"),
)


def identity(
    run: RunOptions, schedule: Schedule, description: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return what defines a run, in the names of ``allow_changes``."""
    return {name: description.get(name) for name in _OF_DATA} | {
        "random_seed": run.seed,
        "train_unit": schedule.unit.name.lower(),
        "accumulation_steps": schedule.accumulation_steps,
        "precision": engine.precision.value,
    }


def limits(schedule: Schedule) -> dict[str, float | None]:
    """Return the options that end a run; raising one lets a finished run go on."""
    return {
        "total_steps": schedule.total_steps,
        "early_stop_cycles": schedule.early_stop_cycles,
    }


def is_extended(schedule: Schedule, stored: Mapping[str, Any]) -> bool:
    """Whether this run is meant to be longer than the one that wrote the checkpoint."""
    return any(now > before for now, before in _pair_limits(schedule, stored))


def is_shortened(schedule: Schedule, stored: Mapping[str, Any]) -> bool:
    """Whether this run is meant to be shorter than the one that wrote the checkpoint."""
    return any(now < before for now, before in _pair_limits(schedule, stored))


def _pair_limits(schedule: Schedule, stored: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [(now, stored.get(name)) for name, now in limits(schedule).items()]
    infinite = float("inf")
    return [
        (infinite if now is None else now, infinite if before is None else before)
        for now, before in pairs
    ]


def is_still_finished(schedule: Schedule, record: Record, reason: str) -> bool:
    """Whether a run that was marked as finished has nothing left to train under these options.

    Args:
        schedule: the present options.
        record: the content of the marked checkpoint.
        reason: why the run came to its end there.
    """
    stored = record.options
    if stored.get("train_unit") != schedule.unit.name.lower():
        return False
    cursor = Cursor(**record.cursor)
    if is_limit(reason) and not cursor.stop_reason:
        # The mark may have been made under a smaller total than that of the checkpoint.
        state = TrainingState(**record.training_state)
        return bool(find_limit(schedule, state, cursor))
    return not is_extended(schedule, stored)


def note_limits(schedule: Schedule, stored: Mapping[str, Any]) -> list[str]:
    """Say which limits differ from the checkpoint's; returns them as text, to be recorded."""
    changes = [
        f"{name}: {stored[name]} -> {now}"
        for name, now in limits(schedule).items()
        if name in stored and stored[name] != now
    ]
    for text in changes:
        _LOGGER.info("Changed since the checkpoint: %s.", text)
    return changes


def note_fingerprint(description: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Warn of a data set that says of itself that it is another one; returns that as text.

    It is the user's own mark of the data, so what a difference means is the user's to judge.
    """
    before, now = stored.get("fingerprint"), description.get("fingerprint")
    if before is None or before == now:
        return []
    text = f"fingerprint: {before!r} -> {now!r}"
    _LOGGER.warning(
        "The training data set is not that of the checkpoint: it has another fingerprint (%s). The "
        "run continues with the new data, so its results differ from here on.",
        text,
    )
    return [text]


def report_finished(name: str, loaded: Loaded, reason: str, *, is_passed: bool) -> None:
    """Say that there is nothing to do, whose run it is, and what would change that.

    If the run has passed this total, as at the earlier stages of a script that is started again,
    that is no reason for a warning.
    """
    _LOGGER.log(
        logging.INFO if is_passed else logging.WARNING,
        "Nothing to do: the run %r in %s is finished (%s; %s). Raise total_steps or "
        "early_stop_cycles to go on with it, pass resume='never' to start it anew, or give another "
        "model a save_name of its own.",
        name,
        loaded.path.parent,
        reason,
        loaded.path.name,
    )


def reconcile(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    allowed: tuple[str, ...],
    *,
    state: TrainingState,
    cursor: Cursor,
) -> list[str]:
    """Compare what defines the run then and now; returns the changes, ``name: old -> new``.

    An allowed change of data set, length, shuffle, seed or sampler begins the epoch under way anew;
    with another batch size it goes on at the stored sample.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    changed = {
        name: f"{name}: {stored[name]!r} -> {value!r}"
        for name, value in present.items()
        if name in stored and stored[name] != value and (name, stored[name]) != _UNCOUNTED
    }
    refused = [name for name in changed if name not in allowed]
    if refused:
        names = ", ".join(f'"{name}"' for name in refused)
        raise RunMismatchError(
            "The run cannot go on, because what defines it has changed since its checkpoint: "
            f"{'; '.join(changed[name] for name in refused)}. Set it back, or allow the change "
            f"with Trainer(allow_changes=({names},))."
        )
    if any(name in _RESTARTING for name in changed):
        cursor.restart_epoch()
        state.end_epoch()
    for text in changed.values():
        _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
    return list(changed.values())

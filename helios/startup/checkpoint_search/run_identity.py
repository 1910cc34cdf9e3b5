"""What defines a run, what ends it, and how both compare with its checkpoint.

A difference is found before the first step, and must be allowed by the user; this is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded
from helios.core.text import tuple_text
from helios.engines.engine import Engine
from helios.errors import RunMismatchError
from helios.schedule import Schedule, find_limit, is_limit
from helios.startup.options.trainer_options import RunOptions
from helios.state import Cursor, TrainingState

_LOGGER = logging.getLogger(__name__)

_RESTARTING = ("dataset", "length", "shuffle", "seed", "sampler", "is_distributed", "mixture")

_UNCOUNTED = ("length", None)
"""Stored length of a loader with an unknown number of samples."""

_UNNAMED: Mapping[str, Any] = {
    "seeds": {},
    "accumulation_order": "replicas",
    "norm": "whole",
    "init": "setup",
}
"""What is compared for a run that does not name it, and for earlier versions."""

_OF_DATA = (
    *("dataset", "length", "batch_size", "shuffle", "drop_last", "seed", "sampler"),
    *("limit_batches", "is_distributed"),
)

ORDERING = (*_OF_DATA, "mixture", "random_seed", "seeds")
"""Names of what the order of the samples, and their distribution over batches, depend on."""


def identity(
    run: RunOptions, schedule: Schedule, description: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return what defines a run, in the names of ``allow_changes``.

    Seeds of single sources, and the sources of a mixture, are in it only if there are any; and
    ``sharding="full"`` only where it changes bits, in accumulation and in clipping; ``init`` only
    if it is keyed.
    """
    found = {name: description.get(name) for name in _OF_DATA} | {
        "random_seed": run.seed,
        "train_unit": schedule.unit.name.lower(),
        "accumulation_steps": schedule.accumulation_steps,
        "precision": engine.precision.value,
    }
    if description.get("mixture"):
        found["mixture"] = description["mixture"]
    if engine.replicas.is_sharded and schedule.accumulation_steps > 1:
        found["accumulation_order"] = "micro-batches"
    if engine.clips_by_rows:
        found["norm"] = "rows"
    if run.init == "keyed":
        found["init"] = run.init
    return found | {"seeds": run.seeds} if run.seeds else found


def limits(schedule: Schedule) -> dict[str, float | None]:
    """Return the options that end a run; raising one lets a finished run continue."""
    return {
        "total_steps": schedule.total_steps,
        "early_stop_cycles": schedule.early_stop_cycles,
    }


def is_extended(schedule: Schedule, stored: Mapping[str, Any]) -> bool:
    """Whether this run is longer than the one that wrote the checkpoint."""
    return any(now > before for now, before in _pair_limits(schedule, stored))


def is_shortened(schedule: Schedule, stored: Mapping[str, Any]) -> bool:
    """Whether this run is shorter than the one that wrote the checkpoint."""
    return any(now < before for now, before in _pair_limits(schedule, stored))


def _pair_limits(schedule: Schedule, stored: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [(now, stored.get(name)) for name, now in limits(schedule).items()]
    infinite = float("inf")
    return [
        (infinite if now is None else now, infinite if before is None else before)
        for now, before in pairs
    ]


def is_still_finished(schedule: Schedule, record: Record, reason: str) -> bool:
    """Whether a run that was marked as finished has nothing left to train with these options.

    Args:
        schedule: the current options.
        record: the content of the marked checkpoint.
        reason: why the run ended there.
    """
    stored = record.options
    if stored.get("train_unit") != schedule.unit.name.lower():
        return False
    cursor = Cursor(**record.cursor)
    if is_limit(reason) and not cursor.stop_reason:
        # The mark may have been made with a smaller total than that of the checkpoint.
        state = TrainingState(**record.training_state)
        return bool(find_limit(schedule, state, cursor))
    return not is_extended(schedule, stored)


def note_limits(schedule: Schedule, stored: Mapping[str, Any]) -> list[str]:
    """Log which limits differ from the checkpoint's; returns them as text, to be recorded."""
    changes = [
        f"{name}: {stored[name]} -> {now}"
        for name, now in limits(schedule).items()
        if name in stored and stored[name] != now
    ]
    for text in changes:
        _LOGGER.info("Changed since the checkpoint: %s.", text)
    return changes


def note_fingerprint(description: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Warn if the fingerprint of the data set has changed; returns the change as text.

    The user defines the fingerprint, so only the user can judge what a difference means.
    """
    before, now = stored.get("fingerprint"), description.get("fingerprint")
    if before is None or before == now:
        return []
    text = f"fingerprint: {before!r} -> {now!r}"
    _LOGGER.warning(
        "The training data set has another fingerprint than that of the checkpoint (%s). The "
        "run continues with the new data, so its results differ from here on.",
        text,
    )
    return [text]


def report_finished(
    name: str, loaded: Loaded, reason: str, *, is_passed: bool, changes: str
) -> None:
    """Log that the run is finished, and how to continue it.

    If the run has passed this total, as in the earlier stages of a script that is started again,
    this is not a warning.

    Args:
        name: the name of the run.
        loaded: its newest checkpoint.
        reason: why it has ended.
        is_passed: whether the run has passed the end of this start.
        changes: what this start was given otherwise; empty for nothing.
    """
    _LOGGER.log(
        logging.INFO if is_passed else logging.WARNING,
        "Nothing to do: the run %r in %s is finished (%s; %s). %sRaise total_steps or "
        "early_stop_cycles to continue it, pass resume='never' to start a new run, or give another "
        "model its own save_name.",
        name,
        loaded.path.parent,
        reason,
        loaded.path.name,
        f"It was trained with other values: {changes}. " if changes else "",
    )


def reconcile(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    allowed: tuple[str, ...],
    *,
    state: TrainingState,
    cursor: Cursor,
) -> list[str]:
    """Compare what defines the run with the checkpoint; returns changes as ``name: old -> new``.

    After an allowed change of data set, length, shuffle, sampler or a seed of the order, the
    current epoch starts over; with another batch size it continues at the stored sample.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    stored, present = {**_UNNAMED, **stored}, {**_UNNAMED, **present}
    changed = {
        name: f"{name}: {stored[name]!r} -> {value!r}"
        for name, value in present.items()
        if name in stored and stored[name] != value and (name, stored[name]) != _UNCOUNTED
    }
    refused = [name for name in changed if name not in allowed]
    if refused:
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{'; '.join(changed[name] for name in refused)}. Undo the change, or allow it "
            f"with Trainer(allow_changes={tuple_text(refused)})."
        )
    has_other_order = _order_seed(stored, present) != _order_seed(present, present)
    if has_other_order or any(name in _RESTARTING for name in changed):
        cursor.restart_epoch()
        state.end_epoch()
    for text in changed.values():
        _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
    return list(changed.values())


def _order_seed(options: Mapping[str, Any], default: Mapping[str, Any]) -> Any:
    """Return the seed of the order; checkpoints of helios-ml do not contain any."""
    seed = options.get("random_seed", default["random_seed"])
    return options["seeds"].get("order", seed)

"""What defines a run, what ends it, and where it continues.

A difference from its checkpoint is found before the first step, and must be allowed by the user;
this is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded
from helios.core.plain_values import compare_values
from helios.counters import Cursor, TrainingState
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import RunMismatchError
from helios.replicas.replicas import Replicas
from helios.schedule import find_limit, is_limit
from helios.start.options import OF_DATA, ROWS, Options, Scope, allows
from helios.text import tuple_text

_LOGGER = logging.getLogger(__name__)

_RESTARTING = (
    *("dataset", "length", "shuffle", "seed", "sampler", "is_distributed", "mixture"),
    "random_seed",
)

_UNCOUNTED = ("length", None)
"""Stored length of a loader with an unknown number of samples."""

_DEFAULTS: Mapping[str, Any] = {
    "accumulation_order": "replicas",
    "norm": "whole",
    "init": "setup",
    "skip_batches": (),
}
"""What holds where the description of a run does not name it."""

ORDERING = (*OF_DATA, "mixture", "random_seed")
"""Names of what the order of the samples, and their distribution over batches, depend on."""


def identity(options: Options, description: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return what defines a run, in the names of ``allow_changes``.

    What few runs have is in it only for those; ``sharding="full"`` only where it changes bits, in
    accumulation and in clipping.
    """
    found = {name: description.get(name) for name in OF_DATA}
    found |= {name: options.plain(name) for name, row in ROWS.items() if row.scope is Scope.RUN}
    # The engine may be the user's.
    found["precision"] = engine.precision.value
    if description.get("mixture"):
        found["mixture"] = description["mixture"]
    if engine.replicas.is_sharded and options.accumulation_steps > 1:
        found["accumulation_order"] = "micro-batches"
    if engine._clips_by_rows:
        found["norm"] = "rows"
    return {name: x for name, x in found.items() if name not in _DEFAULTS or x != _DEFAULTS[name]}


def limits(options: Options) -> dict[str, float | None]:
    """Return the options that end a run; raising one lets a finished run continue."""
    return {name: options.plain(name) for name, row in ROWS.items() if row.scope is Scope.END}


def is_extended(options: Options, stored: Mapping[str, Any]) -> bool:
    """Whether this run is longer than the one that wrote the checkpoint."""
    return any(now > before for now, before in _pair_limits(options, stored))


def is_shortened(options: Options, stored: Mapping[str, Any]) -> bool:
    """Whether this run is shorter than the one that wrote the checkpoint."""
    return any(now < before for now, before in _pair_limits(options, stored))


def _pair_limits(options: Options, stored: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [(now, stored.get(name)) for name, now in limits(options).items()]
    infinite = float("inf")
    return [
        (infinite if now is None else now, infinite if before is None else before)
        for now, before in pairs
    ]


def find_end(options: Options, loaded: Loaded | None) -> str:
    """Return why the run has ended before, with nothing left to train; else an empty string.

    Args:
        options: the current ones.
        loaded: the checkpoint, which may be marked as the end of the run.
    """
    reason = None if loaded is None or loaded.sidecar is None else loaded.sidecar.finished
    if loaded is None or not reason:
        return ""
    return reason if _is_still_finished(options, loaded.record, reason) else ""


def _is_still_finished(options: Options, record: Record, reason: str) -> bool:
    stored = record.options
    if stored.get("train_unit") != options.plain("train_unit"):
        return False
    cursor = Cursor(**record.cursor)
    if is_limit(reason) and not cursor.stop_reason:
        # The mark may have been made with a smaller total than that of the checkpoint.
        state = TrainingState(**record.training_state)
        return bool(find_limit(options.limits, state, cursor))
    return not is_extended(options, stored)


def has_ended(options: Options, record: Record) -> bool:
    """Whether nothing is left to train, also if a kill has prevented the mark that says so."""
    state, cursor = TrainingState(**record.training_state), Cursor(**record.cursor)
    is_stopped = cursor.stop_reason and not is_extended(options, record.options)
    return bool(is_stopped or find_limit(options.limits, state, cursor))


def note_limits(options: Options, stored: Mapping[str, Any]) -> list[str]:
    """Log which limits differ from the checkpoint's; returns them as text, to be recorded."""
    changes = [
        f"{options.limit if name == 'total_steps' else name}: {stored[name]} -> {now}"
        for name, now in limits(options).items()
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


def report_finished(name: str, loaded: Loaded, reason: str, *, is_passed: bool) -> None:
    """Log that the run is finished, and how to continue it.

    If the run has passed this total, as in the earlier stages of a script that is started again,
    this is not a warning.

    Args:
        name: the name of the run.
        loaded: its newest checkpoint.
        reason: why it has ended.
        is_passed: whether the run has passed the end of this start.
    """
    _LOGGER.log(
        logging.INFO if is_passed else logging.WARNING,
        "Nothing to do: the run %r in %s is finished (%s; %s). Raise %s to continue it, pass "
        "resume='never' to start a new run, or give another model its own save_name.",
        name,
        loaded.path.parent,
        reason,
        loaded.path.name,
        reason.partition(" ")[0] if reason.endswith(" reached") else "early_stop_cycles",
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

    After an allowed change of data set, length, shuffle, sampler or seed, the current epoch starts
    over; with another batch size it continues at the stored sample.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    stored, present = {**_DEFAULTS, **stored}, {**_DEFAULTS, **present}
    changed = {
        each.name: f"{each.name}: {each.before!r} -> {each.after!r}"
        for each in compare_values(stored, present)
        if each.is_contradiction and each[:2] != _UNCOUNTED
    }
    refused = [name for name in changed if not any(allows(known, name) for known in allowed)]
    if refused:
        raise RunMismatchError(
            "The run cannot resume, because what defines it has changed since its checkpoint: "
            f"{'; '.join(changed[name] for name in refused)}. Undo the change, allow it with "
            f"Trainer(allow_changes={tuple_text(refused)}) for a run that goes on with it, or pass "
            "another save_name for a run of its own."
        )
    if any(name in _RESTARTING for name in changed):
        cursor.restart_epoch()
        state.end_epoch()
    for text in changed.values():
        _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
    return list(changed.values())


def check_skipped(
    stored: Sequence[int], present: Sequence[int], source: Source, cursor: Cursor
) -> None:
    """Refuse to skip, or to train on, batches that the run has passed already.

    Raises:
        RunMismatchError: if ``skip_batches`` was changed for any of these.
    """
    place = (cursor.epoch, cursor.batch)
    passed = sorted(n for n in {*stored} ^ {*present} if source.place_of(n) < place)
    if passed:
        raise RunMismatchError(
            f"skip_batches must not change for batches that the run has passed, but changed for "
            f"{', '.join(map(str, passed))}. Go back first, with Trainer(resume=<path of a "
            "checkpoint before them>), or undo the change."
        )


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

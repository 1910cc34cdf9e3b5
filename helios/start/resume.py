"""Loads the checkpoint of a run into what was set up, after comparing both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, final

from helios.best import BestRule, BestSoFar
from helios.checkpoint.capture import apply
from helios.checkpoint.record import Record
from helios.core import rng
from helios.core.plain_values import stored_params
from helios.counters import Cursor, TrainingState
from helios.errors import RunMismatchError
from helios.findings import list_missing
from helios.model.schedulers import NewSettings
from helios.replicas.on_all_ranks import on_first
from helios.run_parts import RunParts
from helios.start.changes import (
    ORDERING,
    check_skipped,
    describe_identity,
    find_cursor,
    is_extended,
    name_params,
    note_fingerprint,
    note_limits,
    reconcile,
)
from helios.start.data_check import DataCheck
from helios.text import with_step

if TYPE_CHECKING:
    from helios.start.training import Training

_LOGGER = logging.getLogger(__name__)


@final
class PendingLoad:
    """The rest of a load, after ``on_training_resume``, which may restore the data.

    Args:
        allows_length: whether the epoch may have another number of samples: then it starts anew.

    Attributes:
        saved_length: the samples of the epoch of the checkpoint; ``None`` if they are unknown.
        data_check: compares the data with that of the checkpoint; ``None`` if nothing does.
    """

    def __init__(self, *, allows_length: bool) -> None:
        self.saved_length: int | None = None
        self.data_check: DataCheck | None = None
        self._allows_length = allows_length
        self._parts: RunParts | None = None
        self._randomness: dict[str, Any] = {}

    def begin(self, parts: RunParts, randomness: dict[str, Any]) -> None:
        """Note what was loaded.

        Args:
            parts: the objects of the run.
            randomness: the generators of the checkpoint.
        """
        self._parts, self._randomness = parts, randomness

    def finish(self, is_complete: bool) -> None:
        """Compare the data with that of the checkpoint, and restore the generators.

        Args:
            is_complete: whether the epoch of the checkpoint is complete.

        Raises:
            RunMismatchError: for other data, or another length, that was not allowed.
        """
        assert self._parts is not None
        self._check_length(self._parts)
        if self.data_check is not None:
            self.data_check.after_hooks(not self._parts.run.is_in_epoch or is_complete)
        # The generators come last, when nothing can draw from them any more.
        rng.load_states(self._randomness)
        self._randomness = {}

    def check_data(self) -> None:
        """Compare the data again, after the hook that begins an epoch."""
        if self.data_check is not None:
            self.data_check.after_hooks(False)

    def _check_length(self, parts: RunParts) -> None:
        """Compare the length of the data with that of the epoch of the checkpoint.

        A data set that grows during training must have been restored by now, because the order of
        its samples depends on its length.
        """
        saved, present = self.saved_length, parts.training_source.length
        if saved is None or present is None or saved == present:
            return
        if not self._allows_length:
            raise RunMismatchError(
                f"The training data must have {saved} samples when the run resumes, as in the "
                f"checkpoint's epoch, got {present} after on_training_resume. If the data set "
                "changes during training, restore it in on_training_resume(state), or allow the "
                'change with Trainer(allow_changes=("length",)).'
            )
        _LOGGER.warning(
            "The training data has %d samples, and had %d in the checkpoint's epoch, which starts "
            "over, as allowed.",
            present,
            saved,
        )
        parts.run.cursor.restart_epoch()
        parts.run.state.end_epoch()


def load_checkpoint(training: Training) -> None:
    """Compare the checkpoint with this start, and restore its state.

    Raises:
        RunMismatchError: for a change that was not allowed.
        StateError: if an object refuses its state.
    """
    run, parts, origin = training.run, training.parts, training.origin
    loaded = origin.loaded
    assert loaded is not None
    record = run.detach(loaded.record, is_shown="on_load_checkpoint" in parts.hooks.active)
    state = TrainingState(**record.training_state)
    description = parts.training_source.description
    cursor = find_cursor(record, description, parts.replicas)
    _note_changes(training, record, state=state, cursor=cursor)
    payload = record.to_payload()
    parts.hooks.emit("on_load_checkpoint", payload)
    adopt_settings = _make_adoption(training)
    seen = Record.from_payload(payload)
    apply(seen, parts, state=state, cursor=cursor)
    training.pending.begin(parts, seen.rng)
    adopt_settings()
    parts.run.asked.stop_reason = cursor.stop_reason
    parts.run.best = _continue_best(record, parts.run.best.rule)
    if parts.schedulers is not None:
        parts.schedulers.remember()
    parts.hooks.emit("on_checkpoint_loaded")
    on_first(run.replicas, partial(_compare_machine, training, record))


def _continue_best(record: Record, rule: BestRule | None) -> BestSoFar:
    """Return the best validations before a start; under another rule, those since then count.

    Args:
        record: the checkpoint.
        rule: what decides in this start; ``None`` if nothing does.
    """
    if rule is None:
        return BestSoFar()
    stored = record.best_validations
    before = BestSoFar() if stored is None else BestSoFar.from_plain(stored)
    if before.rule is not None and before.rule.is_alike(rule):
        return BestSoFar(rule, before.validations[: rule.count], before.since)
    if stored is not None:
        former = before.rule or "nothing"
        _LOGGER.info("From here on %s decides which validation is the best, not %s.", rule, former)
    return BestSoFar(rule, since=record.place[1])


def _note_changes(
    training: Training, record: Record, *, state: TrainingState, cursor: Cursor
) -> None:
    """Find what has changed since the checkpoint, and log and record it.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    run, parts, definition = training.run, training.parts, training.definition
    options, source, changes = run.options, parts.training_source, training.changes
    if is_extended(options, record.options):
        cursor.go_on()
    identity = describe_identity(options, source.description, run.engine)
    allowed = reconcile(
        record.options | name_params(stored_params(record.options)),
        identity | name_params(definition.params),
        options,
        state=state,
        cursor=cursor,
    )
    skipped = (record.options.get("skip_batches", ()), options.skip_batches)
    check_skipped(*skipped, source, cursor)
    made = definition.changes.report()
    changes += [*allowed, *made]
    parts.run.has_changed |= bool(allowed or made)
    renamed = note_fingerprint(source.description, record.options)
    if record.options.get("length") == identity["length"]:
        training.pending.saved_length = record.data.get("length")
    changes += renamed + note_limits(options, record.options)
    changes += _note_missing(training, record)
    _check_data(training, record, allowed + renamed)


def _check_data(training: Training, record: Record, changes: list[str]) -> None:
    """Fetch the last batch again, unless the data is known to be another, or is replayed."""
    run, loaded = training.run, training.origin.loaded
    names = {text.partition(":")[0] for text in changes}
    is_other = bool(names & {*ORDERING, "fingerprint"})
    if run.replay is not None or loaded is None or is_other:
        return
    check = DataCheck(
        record,
        loaded.path.parent,
        training.parts.training_source,
        replicas=run.replicas,
        is_strict=run.options.on_incomplete == "raise",
        note=training.changes.append,
    )
    check.before_load()
    training.pending.data_check = check


def _make_adoption(training: Training) -> Callable[[], None]:
    """Return what puts the settings of ``setup`` back after the load, if they are allowed."""
    schedulers = training.parts.schedulers
    if not training.definition.changes.adopts or schedulers is None:
        return lambda: None
    return NewSettings(training.run.model.discovery.optimizers(), schedulers).apply


def _note_missing(training: Training, record: Record) -> list[str]:
    """Warn of what the checkpoint lacks; returns it as text, to be recorded.

    The first save does not name it again, and this does not repeat what the start has named.
    """
    run, missing = training.run, record.findings.missing
    if not missing:
        return []
    lacking = {p: text for p, text in missing.items() if p not in training.stranded}
    if lacking:
        _LOGGER.warning(
            "The checkpoint of iteration %s is incomplete: it lacks %s. There, the resumed run "
            "has the values of setup(), so it may differ from an uninterrupted run. Declare what "
            'need not be saved: unsaved = (...,). Trainer(on_incomplete="raise") refuses to write '
            "such a checkpoint.",
            with_step(*record.counters),
            list_missing(lacking, most=len(lacking)),
        )
        run.model.discovery.note_named(lacking)
        run.owners.note_named(lacking)
    return [f"resumed without: {', '.join(missing)}"]


def _compare_machine(training: Training, record: Record) -> None:
    """Warn once of versions, devices and settings other than those of the checkpoint."""
    machine = training.machine
    changes = [
        f"{name}: {before} -> {machine[name]}"
        for name, before in record.machine.items()
        if machine.get(name, before) != before
    ]
    if changes:
        _LOGGER.warning(
            "The run resumes where equal bits are not guaranteed: %s. Order and randomness "
            "stay exact; arithmetic may differ in the last bits.",
            ", ".join(changes),
        )
        training.changes += changes

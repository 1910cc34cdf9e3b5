"""Loads the checkpoint of a training into what was set up, after comparing both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from helios.checkpoint.capture import apply
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import list_missing
from helios.core.stored_values import stored_params
from helios.counters import Cursor, TrainingState
from helios.model.new_settings import NewSettings
from helios.replicas.on_all_ranks import on_first
from helios.start import run_identity, run_log
from helios.start.best_score import continue_best
from helios.start.changes import name_params
from helios.start.data_check import DataCheck
from helios.start.training import Training
from helios.text import with_step

_LOGGER = logging.getLogger(__name__)


def load_checkpoint(training: Training) -> None:
    """Compare the checkpoint with this start, and restore its state.

    Raises:
        RunMismatchError: for a change that was not allowed.
        StateError: if an object refuses its state.
    """
    run, session, origin = training.run, training.session, training.origin
    loaded = origin.loaded
    assert loaded is not None
    record = run.detach(loaded.record, is_shown="on_load_checkpoint" in session.hooks.active)
    state = TrainingState(**record.training_state)
    source = session.training_source
    cursor = run_identity.find_cursor(record, source.description, session.replicas)
    _note_changes(training, record, state=state, cursor=cursor)
    payload = record.to_payload()
    session.hooks.emit("on_load_checkpoint", payload)
    adopt_settings = _make_adoption(training)
    apply(Record.from_payload(payload), session, state=state, cursor=cursor)
    adopt_settings()
    session.agreement.asked.stop_reason = cursor.stop_reason
    folder = None if origin.is_branch else origin.folder
    session.best = continue_best(
        record.best_validations,
        session.best.rule,
        after=record.place[1],
        folder=None if folder is None else folder.path,
        replicas=run.replicas,
    )
    if session.schedulers is not None:
        session.schedulers.remember()
    session.hooks.emit("on_checkpoint_loaded")
    on_first(run.replicas, partial(_compare_machine, training, record))


def _note_changes(
    training: Training, record: Record, *, state: TrainingState, cursor: Cursor
) -> None:
    """Find what has changed since the checkpoint, and log and record it.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    run, session, definition = training.run, training.session, training.definition
    options, source, changes = run.options, session.training_source, training.changes
    if run_identity.is_extended(options, record.options):
        cursor.go_on()
    identity = run_identity.identity(options, source.description, run.engine)
    allowed = run_identity.reconcile(
        record.options | name_params(stored_params(record.options)),
        identity | name_params(definition.params),
        options.allow_changes,
        state=state,
        cursor=cursor,
    )
    skipped = (record.options.get("skip_batches", ()), options.skip_batches)
    run_identity.check_skipped(*skipped, source, cursor)
    made = definition.changes.report()
    changes += [*allowed, *made]
    session.has_changed |= bool(allowed or made)
    renamed = run_identity.note_fingerprint(source.description, record.options)
    if record.options.get("length") == identity["length"]:
        session.saved_length = record.data.get("length")
        session.allows_other_length = "length" in options.allow_changes
    changes += renamed + run_identity.note_limits(options, record.options)
    run_log.report_arguments(record.options)
    changes += _note_missing(training, record)
    _check_data(training, record, allowed + renamed)


def _check_data(training: Training, record: Record, changes: list[str]) -> None:
    """Fetch the last batch again, unless the data is known to be another, or is replayed."""
    run, loaded, session = training.run, training.origin.loaded, training.session
    names = {text.partition(":")[0] for text in changes}
    is_other = bool(names & {*run_identity.ORDERING, "fingerprint"})
    if run.replay is not None or loaded is None or is_other:
        return
    check = DataCheck(
        record,
        loaded.path.parent,
        session.training_source,
        replicas=run.replicas,
        is_strict=run.options.on_incomplete == "raise",
        note=training.changes.append,
    )
    check.before_load()
    session.check_data = check.after_hooks


def _make_adoption(training: Training) -> Callable[[], None]:
    """Return what puts the settings of ``setup`` back after the load, if they are allowed."""
    schedulers = training.session.schedulers
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
            "The checkpoint of iteration %s is incomplete: it lacks %s. There the resumed "
            "run is as setup() makes it, so bits may differ from those of an uninterrupted "
            "run. Declare what need not be saved: unsaved = (...,). "
            'Trainer(on_incomplete="raise") refuses to write such a checkpoint.',
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

"""Loads the checkpoint of a run into what was set up, after comparing both, and the data.

Before anything is loaded, the batch of the last line of the ledger that the checkpoint covers is
fetched again under its key, and compared with the line. What the fetch changes in the data set is
put back, as far as it is small; the load puts right all that a checkpoint holds. A batch may also
differ because it depends on what the load or a hook gives the data set: so one that differs is
fetched again after ``on_training_resume``, and after ``on_training_epoch_start`` if an epoch
begins. It counts if it is as before the load then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import nn

from helios.backup import Backup
from helios.best import BestRule, BestSoFar
from helios.checkpoint.capture import apply
from helios.checkpoint.record import Record
from helios.core import rng
from helios.core.plain_values import stored_params
from helios.counters import Cursor, TrainingState
from helios.data.loader import KeyedLoader
from helios.data.source import Source
from helios.errors import LedgerError, RankError, RunMismatchError
from helios.findings import list_missing
from helios.ledger.book import FILE_NAME, read_lines_before
from helios.ledger.writer import add_up, as_numbers, from_numbers
from helios.model.schedulers import NewSettings
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
from helios.start.stateful import find_data_sets
from helios.state.values import is_large
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
    settings = None
    if training.setup_changes.adopts and parts.schedulers is not None:
        settings = NewSettings(run.model.discovery.optimizers(), parts.schedulers)
    seen = Record.from_payload(payload)
    apply(seen, parts, state=state, cursor=cursor)
    training.pending.begin(parts, seen.rng)
    if settings is not None:
        settings.apply()
    parts.run.asked.stop_reason = cursor.stop_reason
    parts.run.best = _continue_best(record, parts.run.best.rule)
    if parts.schedulers is not None:
        parts.schedulers.remember()
    parts.hooks.emit("on_checkpoint_loaded")
    run.replicas.on_first(partial(_compare_machine, training, record))


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
    run, parts = training.run, training.parts
    options, source, changes = run.options, parts.training_source, training.saves.changes
    if is_extended(options, record.options):
        cursor.go_on()
    identity = describe_identity(options, source.description, run.engine)
    allowed = reconcile(
        record.options | name_params(stored_params(record.options)),
        identity | name_params(training.params),
        options,
        state=state,
        cursor=cursor,
        keeps_settings=training.setup_changes.keeps_settings,
    )
    skipped = (record.options.get("skip_batches", ()), options.skip_batches)
    check_skipped(*skipped, source, cursor)
    made = training.setup_changes.report()
    changes += [*allowed, *made]
    parts.run.has_changed |= bool(allowed or made)
    renamed = note_fingerprint(source.description, record.options)
    if record.options.get("length") == identity["length"]:
        training.pending.saved_length = record.data.get("length")
    changes += renamed + note_limits(options, record.options)
    changes += _note_missing(training, record)
    names = {text.partition(":")[0] for text in allowed + renamed}
    # Unless the data is known to be another, or is replayed.
    if run.replay is None and not names & {*ORDERING, "fingerprint"}:
        training.pending.data_check = DataCheck(training, record)
        training.pending.data_check.before_load()


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
    machine = training.saves.machine
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
        training.saves.changes += changes


# ---- is this the data that the run was trained on?

_MOST_SHOWN = 8
_UNKNOWN = "It cannot be checked whether the training data is the same as before: %s depends on %s."


class _Trained(NamedTuple):
    """A batch of the run, as its ledger has it."""

    epoch: int
    batch: int
    iteration: int
    data: list[Any]


class _Seen(NamedTuple):
    """What a fetch has seen: as in a line of the ledger, and the samples, or an error."""

    data: list[Any]
    samples: list[Any]
    error: str


@final
class DataCheck:
    """Compares the last batch that a run was trained on with what the data set gives now.

    All processes make it and call its methods together.

    Args:
        training: the training; a difference is recorded among its changes.
        record: the checkpoint.
    """

    def __init__(self, training: Training, record: Record) -> None:
        loaded, source = training.origin.loaded, training.parts.training_source
        assert loaded is not None
        self._source, self._changes = source, training.saves.changes
        self._replicas = training.run.replicas
        self._is_strict = training.run.options.on_incomplete == "raise"
        folder = loaded.path.parent
        self._trained = self._replicas.on_first(lambda: _find_last_batch(record, folder, source))
        self._suspect: _Seen | None = None

    def before_load(self) -> None:
        """Fetch the batch, and find out what a difference may mean."""
        trained = self._trained
        if trained is None:
            return
        (alone,) = self._fetch(1)
        if self._matches(alone):
            return
        first, second = self._fetch(2)
        place = f"the batch of iteration {trained.iteration}"
        if alone.error or alone == first == second:
            self._suspect = alone
        elif alone != first:
            self._warn(
                "The training data is not reproducible: %s has different content each time it is "
                "fetched, in the same state and with the same seed, so a resumed run differs from "
                "an uninterrupted one. Draw from random, torch or numpy.random, which Helios "
                "seeds for each batch, and read neither times nor unordered sets.",
                place,
            )
        else:
            _LOGGER.info(_UNKNOWN, place, "what the data set has fetched before")

    def after_hooks(self, is_followed: bool) -> None:
        """Say that the data is another, if the batch still differs; only once.

        Args:
            is_followed: whether the hook that begins an epoch still follows: then nothing is said.

        Raises:
            RunMismatchError: in all processes, if a difference is an error.
        """
        trained, alone = self._trained, self._suspect
        if trained is None or alone is None:
            return
        (seen,) = self._fetch(1)
        if self._matches(seen) or not is_followed:
            self._suspect = None
        if self._suspect is not None or self._matches(seen):
            return
        if not seen.error and seen != alone and seen.data[0] == trained.data[0]:
            place = f"the batch of iteration {trained.iteration}"
            _LOGGER.info(_UNKNOWN, place, "what the run or a hook has set in the data set")
            return
        text = _describe(trained, seen)
        self._changes.append(f"other training data than at iteration {trained.iteration}")
        if self._is_strict:
            # Rank 0 reports it; the errors of the others follow from that.
            cause = RankError("Rank 0 has raised the same error.") if self._replicas.rank else None
            raise RunMismatchError(text) from cause
        self._warn("%s on_incomplete='raise' makes this an error.", text)

    def _warn(self, text: str, *values: object) -> None:
        if self._replicas.rank == 0:
            _LOGGER.warning(text, *values)

    def _matches(self, seen: _Seen) -> bool:
        return self._trained is not None and not seen.error and seen.data == self._trained.data

    def _fetch(self, times: int) -> list[_Seen]:
        """Fetch the batch, one time after another; returns what all processes have seen."""
        trained, replicas, error = self._trained, self._replicas, ""
        assert trained is not None
        found: list[Any] | None = []
        try:
            with self._data_kept():
                found = self._source.fetch_again(trained.epoch, trained.batch, times)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        own = []
        for hands, contents in found or ():
            seen = as_numbers(add_up(replicas.local_replicas, contents, hands))
            own.append((seen, hands))
        everybodys = replicas.gather_objects((own, found is not None, error))
        errors = next(filter(None, (failure for *_, failure in everybodys)), "")
        if errors or not all(known for _, known, _ in everybodys):
            # An order that is not known cannot be compared.
            data = [] if errors else trained.data
            return [_Seen(data, [], errors)] * times
        rounds = zip(*(own for own, *_ in everybodys), strict=True)
        return [_join([*each]) for each in rounds]

    @contextmanager
    def _data_kept(self) -> Iterator[None]:
        """Give the data set what it had, after a fetch in this process, but for large members."""
        loader, owners = self._source.loader, []
        if isinstance(loader, KeyedLoader) and not loader.num_workers:
            owners = [part for _, part in find_data_sets(self._source)]
        backup = Backup(owners, leave=lambda value: isinstance(value, nn.Module) or is_large(value))
        try:
            yield
        finally:
            backup.restore()


def _join(parts: list[Any]) -> _Seen:
    """Return what all processes have seen of a batch, as a line of the ledger has it."""
    totals = [sum(each) for each in zip(*(numbers for numbers, _ in parts), strict=True)]
    hands = [hand for _, hands in parts for hand in hands]
    samples = chain.from_iterable(hand if isinstance(hand, list) else [hand] for hand in hands)
    return _Seen(from_numbers(totals).as_plain(), [*samples], "")


def _find_last_batch(record: Record, folder: Path, source: Source) -> _Trained | None:
    """Return the batch of the last line that a checkpoint covers; ``None`` if it is unknown."""
    if record.ledger is None:
        return None
    lines = read_lines_before(folder / FILE_NAME, record.ledger)
    try:
        line = json.loads(next(lines, b"null"))
        epoch, iteration, _ = line["at"]
        batch = Cursor(**record.cursor).batch - 1
        if batch < 0:
            batch = _count_before(lines, epoch, source)
        is_known = batch >= 0 and iteration == record.place[1] and line["data"][0] is not None
        return _Trained(epoch - 1, batch, iteration, line["data"]) if is_known else None
    except (LedgerError, ValueError, LookupError, TypeError):
        return None


def _count_before(lines: Iterator[bytes], epoch: int, source: Source) -> int:
    """Return how many lines of an epoch are before its last one; -1 if that is unknown."""
    most, head = source.num_batches(), b'{"at":[%d,' % epoch
    for count, line in enumerate(lines):
        if not line.startswith(head):
            # A ledger may begin within an epoch, and an epoch that has started over has more lines.
            is_whole = json.loads(line).get("after", 0) == 0 and not source.count_skipped(epoch - 1)
            return count if is_whole and most is not None and count < most else -1
    return -1


def _describe(trained: _Trained, seen: _Seen) -> str:
    """Return what differs, what it means and what helps."""
    shown = ", ".join(map(repr, seen.samples[:_MOST_SHOWN]))
    if len(seen.samples) > _MOST_SHOWN:
        shown += f" and {len(seen.samples) - _MOST_SHOWN} more"
    if seen.error:
        what = f"can no longer be fetched ({seen.error})"
    elif seen.data[0] != trained.data[0]:
        what = f"had other samples than {shown}, which are now at its place in the order"
    else:
        what = f"has other content now; its first sample is {seen.samples[0]!r} (of {shown})"
    return (
        "The training data is not what the run was trained on: the batch of iteration "
        f"{trained.iteration} (epoch {trained.epoch + 1}, batch {trained.batch + 1}) {what}. So "
        "samples may be trained on twice or never, or may also be in the validation data, and the "
        "results differ from those of an uninterrupted run. If the data is split or changed at "
        "random, draw in setup() from random, torch or numpy.random, which Helios seeds, or from "
        "a generator with a fixed seed. If samples depend on a value that a hook sets, set it in "
        "on_training_resume, too. Otherwise restore the files, transforms and libraries of the "
        "last start."
    )

"""Whether a resumed run gets the data that it was trained on.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import nn

from helios.backup import Backup
from helios.checkpoint.record import Record
from helios.counters import Cursor
from helios.data.loader import KeyedLoader
from helios.data.source import Source
from helios.errors import LedgerError, RankError, RunMismatchError
from helios.ledger.book import FILE_NAME, read_lines_before
from helios.ledger.writer import add_up, as_numbers, from_numbers
from helios.replicas.on_all_ranks import on_first
from helios.replicas.replicas import Replicas
from helios.start.stateful import find_data_sets
from helios.state.values import is_large

_LOGGER = logging.getLogger(__name__)
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
        record: the checkpoint.
        folder: where the ledger is that the checkpoint belongs to.
        source: the training data.
        replicas: the replicas of the run.
        is_strict: whether a difference is an error.
        note: takes a difference as text, to be recorded.
    """

    def __init__(
        self,
        record: Record,
        folder: Path,
        source: Source,
        *,
        replicas: Replicas,
        is_strict: bool,
        note: Callable[[str], None],
    ) -> None:
        self._source = source
        self._replicas = replicas
        self._is_strict = is_strict
        self._note = note
        self._trained = on_first(replicas, lambda: _find_last_batch(record, folder, source))
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
        self._note(f"other training data than at iteration {trained.iteration}")
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

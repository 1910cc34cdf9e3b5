"""What the files beside the checkpoints of a run say: the one place that reads them for people."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from helios.best import BestValidation
from helios.ledger import book, run_file
from helios.ledger.line import read_float
from helios.ledger.verification import LedgerStatus, verify
from helios.storage.local_paths import as_local_path

FILE_NAMES = (book.FILE_NAME, run_file.FILE_NAME)
_ENDS = (run_file.END, run_file.INTERRUPTION, run_file.ERROR)
# The first one of several that have the same values under the same name is shown.
_SETTINGS = ("params", "given", "definition", "options", "helios", "machine", "git")
# Names of runs, and where their files are.
_HIDDEN = ("run_name", "chkpt_root", "run_path", "log_path", "src_root", "resume")


@dataclass
class RunStart:
    """A start of a run.

    Attributes:
        time, host: when and where; in UTC.
        processes: their number.
        iteration: the one that it continued from.
        changes: what has changed since the start before.
        end: how it ended.
    """

    time: str
    host: str
    processes: int
    iteration: int
    changes: list[str] = field(default_factory=list)
    end: str = ""


@dataclass
class RunFacts:
    """What is known of a run, except for the lines of its ledger.

    Attributes:
        folder: its folder.
        newest: the event of the newest start.
        starts: the oldest first.
        validations: the events of those with scores, each iteration once.
        stretches: those of iterations, likewise.
        seconds: the time of all stretches, also of those that were repeated after a kill.
    """

    folder: Path
    newest: Mapping[str, Any] = field(default_factory=dict)
    starts: list[RunStart] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    stretches: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def missing(self) -> list[str]:
        """Names of files that are not there."""
        return [name for name in FILE_NAMES if not (self.folder / name).is_file()]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """What the newest start ran with: flat tables, by topic."""
        tables = {topic: self.newest[topic] for topic in _SETTINGS if topic in self.newest}
        return {
            topic: dict(_flatten(table)) if isinstance(table, Mapping) else {topic: table}
            for topic, table in tables.items()
        }

    @property
    def best(self) -> BestValidation | None:
        """The best validation, as the run has judged it; ``None`` if nothing decides."""
        newest = self.validations[-1:]
        return BestValidation.from_plain(newest[0].get("best")) if newest else None

    def find_last_scores(self) -> dict[str, float]:
        """Return the scores of the last validation that had them, by name."""
        return {name: x for line in self.validations for name, x in line["scores"].items()}

    def find_last_losses(self) -> dict[str, float]:
        """Return the losses of the last iteration, by name."""
        path = self.folder / book.FILE_NAME
        return book.read_last_losses(path) if path.is_file() else {}

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event."""
        match event["event"]:
            case run_file.START:
                self._add_start(event)
            case run_file.VALIDATION:
                scores = {name: float(score) for name, score in event["scores"].items()}
                self.validations.append(event | {"scores": scores})
            case run_file.STRETCH:
                self.seconds += event["seconds"]
                self.stretches.append(event)
            case run_file.END if self.starts:
                self.starts[-1].end = event["cause"]
            case run_file.INTERRUPTION | run_file.ERROR if self.starts:
                self.starts[-1].end = f"{event['event']}: {event['cause']}"

    def _add_start(self, event: dict[str, Any]) -> None:
        iteration = event["iteration"]
        if iteration == 0 and event["run"] != self.newest.get("run"):
            # Another run in the same folder.
            self.starts, self.seconds = [], 0.0
        # What was done after the checkpoint is repeated.
        self.validations = [x for x in self.validations if x["iteration"] <= iteration]
        self.stretches = [x for x in self.stretches if x["iteration"] <= iteration]
        self.newest = event
        time, host, count = event["time"], event["host"], event["processes"]
        self.starts.append(RunStart(time, host, count, iteration, event.get("changes", [])))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables, with their whole names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_run(place: str | Path) -> Path:
    """Return the folder of a run.

    Args:
        place: the folder itself, a file that the run has recorded itself in, or a folder above a
            single run.

    Raises:
        LedgerError: if there is no such file, or more than one run.
    """
    path = as_local_path("The run", place)
    if path.is_file() and path.name in FILE_NAMES:
        return path.parent
    return book.find_folder(path, FILE_NAMES)


def read_run(folder: Path) -> RunFacts:
    """Return what the file of events in the folder of a run says; empty without one.

    Raises:
        LedgerError: if the file cannot be read.
    """
    found = RunFacts(folder)
    for event in run_file.read_run_file(folder):
        # A line that somebody has edited is left out.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            found.add(event)
    for start in found.starts:
        start.end = start.end or ("no end so far" if start is found.starts[-1] else "killed")
    return found


def find_differences(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Return what the newest starts of runs differ in: the value in each run, by name.

    ``None`` stands for no value. A value that several topics hold is in it once.
    """
    tables = [
        {
            (topic, name): value
            for topic, table in run.settings.items()
            for name, value in table.items()
            if name not in _HIDDEN
        }
        for run in runs
    ]
    found: dict[tuple[str, str], list[Any]] = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key) for table in tables]
        is_known = any(_end(key[1]) == _end(name) and values == x for (_, name), x in found.items())
        if any(value != values[0] for value in values) and not is_known:
            found[key] = values
    ends = [_end(name) for _, name in found]
    return {
        _end(name) if ends.count(_end(name)) == 1 else f"{topic}.{name}": values
        for (topic, name), values in found.items()
    }


def _end(name: str) -> str:
    return name.rpartition(".")[2]


Curve: TypeAlias = tuple["array[float]", "array[float]"]
"""Iterations, and the number of each."""


@dataclass
class RunCurves:
    """The curves of a run, by name.

    Attributes:
        losses, scores, rates, throughput: ``rates`` are those that steps have used, and
            ``throughput`` is in iterations per second, without validations.
        status: what the verification of the ledger has found; ``None`` without one.
        at: the epoch, iteration and step of the last line.
    """

    losses: dict[str, Curve] = field(default_factory=dict)
    scores: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, Curve] = field(default_factory=dict)
    throughput: dict[str, Curve] = field(default_factory=dict)
    status: LedgerStatus | None = None
    at: tuple[int, int, int] = (0, 0, 0)

    def list_curves(self, most: int) -> dict[str, Curve]:
        """Return the curves by title, at most so many of each kind."""
        found = (
            {f"loss: {name}": curve for name, curve in self.losses.items()},
            {f"score: {name}": curve for name, curve in self.scores.items()},
            self.rates,
            self.throughput,
        )
        return {title: each[title] for each in found for title in islice(each, most)}


def read_curves(run: RunFacts) -> RunCurves:
    """Read all curves of a run; lines of its ledger that are not good are left out.

    Raises:
        LedgerError: if the ledger cannot be read.
    """
    found = RunCurves()

    def add_line(line: dict[str, Any]) -> None:
        found.at = line["at"]
        iteration = found.at[1]
        for name, digits in line.get("loss", {}).items():
            _add(found.losses, name, iteration, digits)
        rates = line.get("lr", ())
        for number, rate in enumerate(rates, 1):
            name = "learning rate" + f", group {number}" * (len(rates) > 1)
            _add(found.rates, name, iteration, rate)

    if book.FILE_NAME not in run.missing:
        found.status = verify(run.folder / book.FILE_NAME, watch=add_line)
    for line in run.validations:
        for name, score in line["scores"].items():
            _add(found.scores, name, line["iteration"], score)
    for place, speed in _read_speeds(run):
        _add(found.throughput, "iterations per second", place, speed)
    return found


def _add(curves: dict[str, Curve], name: str, place: int, number: Any) -> None:
    if number is not None:
        places, numbers = curves.setdefault(name, (array("d"), array("d")))
        value = read_float(number) if isinstance(number, str) else number
        places.append(place)
        numbers.append(value)


def _read_speeds(run: RunFacts) -> Iterator[tuple[int, float]]:
    for line in run.stretches:
        seconds = line["seconds"] - line.get("paused", 0.0)
        if seconds > 0:
            yield line["iteration"], line["iterations"] / seconds

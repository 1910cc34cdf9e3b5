"""What the files beside the checkpoints of a run say: the one place that reads them for people."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import helios.ledger.book as book
import helios.ledger.manifest_file as manifest_file
import helios.ledger.timing as timing
from helios.best import BestValidation
from helios.ledger import run_file
from helios.ledger.line import read_float
from helios.ledger.verification import LedgerStatus, verify
from helios.storage.local_paths import as_local_path

FILE_NAMES = (book.FILE_NAME, run_file.FILE_NAME, manifest_file.FILE_NAME, timing.FILE_NAME)
_ENDS = (run_file.END, run_file.INTERRUPTION, run_file.ERROR)


@dataclass
class RunStart:
    """A start of a run.

    Attributes:
        time, host: when and where; in UTC.
        processes: their number.
        iteration: the one that it continued from.
        changes: what was changed since the start before.
        end: how it ended.
    """

    time: str
    host: str
    processes: str
    iteration: int
    changes: list[str] = field(default_factory=list)
    end: str = ""


@dataclass
class RunFacts:
    """What is known of a run, except for the lines of its ledger.

    Attributes:
        folder: its folder.
        facts: what the newest start ran with, by topic.
        starts: the oldest first.
        times: times and scores.
        missing: names of files that are not there.
    """

    folder: Path
    facts: Mapping[str, Any]
    starts: list[RunStart]
    times: timing.Stretches
    missing: list[str]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def best(self) -> BestValidation | None:
        """The best validation, as the run has judged it; ``None`` if nothing decides."""
        scores = self.times.scores
        return BestValidation.from_plain(scores[-1].get("best")) if scores else None

    def find_last_scores(self) -> dict[str, float]:
        """Return the scores of the last validation that had them, by name."""
        return {name: x for line in self.times.scores for name, x in line["scores"].items()}

    def find_last_losses(self) -> dict[str, float]:
        """Return the losses of the last iteration, by name."""
        path = self.folder / book.FILE_NAME
        return book.read_last_losses(path) if path.is_file() else {}

    def find_last_iteration(self) -> int | None:
        """Return the last iteration; ``None`` if it is unknown."""
        path = self.folder / book.FILE_NAME
        return book.read_last_iteration(path) if path.is_file() else None


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


def read_run(place: str | Path) -> RunFacts:
    """Read what the files of a run say of it, except for the lines of its ledger.

    Raises:
        LedgerError: if there is no run, or if one of its files cannot be read.
    """
    folder = find_run(place)
    manifest = manifest_file.read_manifest(folder)
    facts = {} if manifest is None else manifest.sections[-1].facts
    missing = [name for name in FILE_NAMES if not (folder / name).is_file()]
    return RunFacts(folder, facts, _read_starts(folder), timing.read_timing(folder), missing)


def _read_starts(folder: Path) -> list[RunStart]:
    found: list[RunStart] = []
    for event in run_file.read_run_file(folder):
        cause = str(event.get("cause", ""))
        if event["event"] in run_file.STARTS:
            time, host, count = (str(event.get(x, "-")) for x in ("time", "host", "processes"))
            found.append(RunStart(time, host, count, int(event.get("iteration", 0))))
        elif found and event["event"] == run_file.CHANGE:
            found[-1].changes.append(cause)
        elif found and event["event"] in _ENDS:
            found[-1].end = (
                cause if event["event"] == run_file.END else f"{event['event']}: {cause}"
            )
    for start in found:
        start.end = start.end or ("no end so far" if start is found[-1] else "killed")
    return found


Curve: TypeAlias = tuple["array[float]", "array[float]"]
"""Iterations, and the number of each."""


@dataclass
class RunCurves:
    """The curves of a run, by name.

    Attributes:
        losses, scores, rates, throughput: ``rates`` are those that the updates have used, and
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
    sources = [*run.times.rates]
    ends: list[str | None] = []
    source: Any = timing.OWN

    def add_line(line: dict[str, Any]) -> None:
        nonlocal ends, source
        found.at = line["at"]
        iteration = found.at[1]
        for name, digits in line.get("loss", {}).items():
            _add(found.losses, name, iteration, digits)
        if "lr" not in line:
            return
        # A list of rates is that of one iteration, and the source of the next one follows.
        while sources and sources[0]["iteration"] <= iteration:
            source = sources.pop(0)["rates"]
        before, ends = ends, line["lr"]
        used = before if source == timing.BEFORE else source if isinstance(source, list) else ends
        for number, rate in enumerate(used, 1):
            name = "learning rate" + f", group {number}" * (len(used) > 1)
            _add(found.rates, name, iteration, rate)

    if book.FILE_NAME not in run.missing:
        found.status = verify(run.folder / book.FILE_NAME, watch=add_line)
    for line in run.times.scores:
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
    for line in run.times.lines:
        seconds = line["seconds"] - line.get("paused", 0.0)
        if seconds > 0:
            yield line["iteration"], line["iterations"] / seconds

"""Everything that the files of a run say of it, for reports and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helios.ledger.book as book
import helios.ledger.lineage as lineage
import helios.ledger.manifest_file as manifest_file
import helios.ledger.timing as timing
from helios.best import BestRule, BestSoFar, BestValidation, Validation
from helios.ledger.book import find_folder
from helios.ledger.lineage import read_lineage
from helios.ledger.manifest_file import Manifest, read_manifest
from helios.ledger.timing import Stretches, read_timing
from helios.storage.local_paths import as_local_path

FILE_NAMES = (book.FILE_NAME, lineage.FILE_NAME, manifest_file.FILE_NAME, timing.FILE_NAME)
"""The files in which a run records itself."""
_MISSING = {
    book.FILE_NAME: "There is no ledger, so this says nothing of losses and learning rates.",
    lineage.FILE_NAME: "There is no lineage, so starts, kills and saves are unknown.",
    manifest_file.FILE_NAME: "There is no manifest, so command, options and environment are "
    "unknown.",
    timing.FILE_NAME: "There are no times, so throughput and scores are unknown.",
}
_ENDS = (lineage.END, lineage.INTERRUPTION, lineage.ERROR)


@dataclass
class Attempt:
    """A process of a run, from its start to its end.

    Attributes:
        start: the event of its start; empty if it is not in the lineage.
        events: all others.
        is_last: whether no other start followed.
    """

    start: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    is_last: bool = False

    @property
    def iteration(self) -> int:
        """The iteration that it continued from."""
        return int(self.start.get("iteration", 0))

    @property
    def end(self) -> dict[str, Any] | None:
        """The event of its end; ``None`` if none was written."""
        return next((each for each in self.events if each["event"] in _ENDS), None)

    @property
    def was_killed(self) -> bool:
        """Whether it ended without a trace before another start."""
        return self.end is None and not self.is_last

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.end is not None:
            parts = (self.end["event"], self.end.get("cause"))
            return ": ".join(str(part) for part in parts if part)
        return "killed (no end was recorded)" if self.was_killed else "no end recorded so far"


@dataclass
class RunFacts:
    """What is known of a run.

    Attributes:
        folder: its folder.
        ledger: its ledger; ``None`` without one.
        manifest: its manifest; ``None`` without one.
        attempts: its starts, the oldest first.
        times: its times and scores.
        missing: a sentence for each file that is missing, by its name.
    """

    folder: Path
    ledger: Path | None
    manifest: Manifest | None
    attempts: list[Attempt]
    times: Stretches
    missing: dict[str, str]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says of the newest start, by topic; empty without a manifest."""
        return self.manifest.sections[-1].facts if self.manifest is not None else {}

    @property
    def num_kills(self) -> int:
        """How many starts were killed."""
        return sum(attempt.was_killed for attempt in self.attempts)

    def find_scores(self) -> dict[str, list[tuple[int, float]]]:
        """Return iterations and values of each score."""
        found: dict[str, list[tuple[int, float]]] = {}
        for line in self.times.scores:
            for name, score in line["scores"].items():
                found.setdefault(name, []).append((line["iteration"], score))
        return found

    def find_steps(self) -> dict[int, int]:
        """Return optimizer steps at the iterations of scores, as far as they are known."""
        return {line["iteration"]: line["step"] for line in self.times.scores if "step" in line}

    def find_best(self) -> BestValidation | None:
        """Return the best validation, as the run has judged it; ``None`` if nothing decides.

        Earlier versions have written no judgement: where the manifest names a ``KeepBest``, the
        scores are judged by it.
        """
        scores = self.times.scores
        if scores and "best" in scores[-1]:
            return BestValidation.from_plain(scores[-1]["best"])
        store = self.facts.get("options", {}).get("store", {})
        stored = store.get("keep_best") if isinstance(store, Mapping) else None
        if not isinstance(stored, Mapping) or stored.get("mode") not in ("min", "max"):
            return None
        judged = BestSoFar(BestRule(stored.get("metric"), stored["mode"]))
        for line in scores:
            validation = Validation(line["iteration"], line["scores"], line.get("step"))
            judged.judge(validation, has_improved=False)
        return judged.best


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
    return find_folder(path, FILE_NAMES)


def read_run(place: str | Path) -> RunFacts:
    """Read what the files of a run say of it, except for the lines of its ledger.

    Raises:
        LedgerError: if there is no run, or if one of its files cannot be read.
    """
    folder = find_run(place)
    ledger = folder / book.FILE_NAME
    return RunFacts(
        folder,
        ledger if ledger.is_file() else None,
        read_manifest(folder),
        list(_read_attempts(folder)),
        read_timing(folder),
        {name: text for name, text in _MISSING.items() if not (folder / name).is_file()},
    )


def _read_attempts(folder: Path) -> Iterator[Attempt]:
    attempt: Attempt | None = None
    # A damaged checkpoint is passed over before the start that notices it.
    early: list[dict[str, Any]] = []
    for event in read_lineage(folder):
        if event["event"] == lineage.FALLBACK:
            early.append(event)
        elif event["event"] in lineage.STARTS:
            if attempt is not None:
                yield attempt
            attempt, early = Attempt(event, early), []
        else:
            attempt = attempt or Attempt({})
            attempt.events.append(event)
    if attempt is not None:
        attempt.is_last = True
        yield attempt

"""Compares runs: what differs between them with their scores, the best first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from helios.best import BestRule, rank_by_score
from helios.errors import ArgumentError
from helios.ledger.manifest_file import flatten
from helios.ledger.run_facts import RunFacts, read_curves, read_run

# The first one of several that have the same values under the same name is shown.
_TOPICS = ("params", "found", "data", "seeds", "options", "program", "versions", "git")
_HIDDEN = ("options.chkpt_root", "options.run_path", "options.log_path", "options.src_root")
_ALSO_HIDDEN = ("versions.helios_files", "versions.torch_build", "git.patch", "git.patch_hash")
_MOST_CHARACTERS = 40
# Squares of larger numbers are not finite.
_MOST = 1e150
_Item = TypeVar("_Item")


@dataclass
class ComparedRun:
    """A run of a comparison.

    Attributes:
        run: its name.
        settings: what differs between the runs, by name.
        scores: those of its best validation, or else the last ones, by name.
    """

    run: str
    settings: dict[str, str]
    scores: dict[str, float]


@dataclass
class ScoreGroup:
    """Runs that differ in nothing but their seeds.

    Attributes:
        settings: what they share, and others do not.
        runs: their names.
        means, deviations: of each score: mean and standard deviation.
    """

    settings: dict[str, str]
    runs: list[str]
    means: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)


@dataclass
class RunComparison:
    """Several runs.

    Attributes:
        by: what decides which validation is the best; ``None`` if the runs do not agree on it.
        shown: which scores these are.
        settings: names of what differs.
        scores: names of the scores.
        rows: the runs, the best first.
        groups: the runs with different seeds and nothing else, the best mean first.
    """

    by: str | None
    shown: str
    settings: list[str]
    scores: list[str]
    rows: list[ComparedRun]
    groups: list[ScoreGroup]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)


def read_runs(places: Sequence[str | Path]) -> dict[str, RunFacts]:
    """Return what is known of runs, by their names: those of folders, or paths where these repeat.

    Raises:
        ArgumentError: for fewer than two runs, or for one that is named twice.
        LedgerError: if a run has no files, or if one cannot be read.
    """
    found = [read_run(place) for place in places]
    folders = {run.folder.resolve() for run in found}
    if len(folders) < max(2, len(found)):
        raise ArgumentError(
            f"compare needs at least two runs, each once, got {', '.join(map(str, places))}."
        )
    names = [run.name for run in found]
    return {str(run.folder) if names.count(run.name) > 1 else run.name: run for run in found}


def compare_runs(runs: Mapping[str, RunFacts]) -> RunComparison:
    """Compare runs by what they ran with, and by their scores."""
    settings = _find_differences(list(runs.values()))
    bests = [run.best for run in runs.values()]
    rules = {best.rule for best in bests if best is not None}
    rule = rules.pop() if len(rules) == 1 else None
    shown = "last validation" if rule is None else f"best validation by {rule}"
    rows = []
    for number, (name, run, best) in enumerate(zip(runs, runs.values(), bests, strict=True)):
        scores = run.find_last_scores() if rule is None else best.scores if best is not None else {}
        own = {key: values[number] for key, values in settings.items()}
        rows.append(ComparedRun(name, own, dict(scores)))
    if not any(row.scores for row in rows):
        shown = "last iteration: its losses"
        for row, run in zip(rows, runs.values(), strict=True):
            row.scores = run.find_last_losses()
    rows = _rank(rows, [row.scores for row in rows], rule)
    return RunComparison(
        None if rule is None else str(rule),
        shown,
        list(settings),
        list(dict.fromkeys(name for row in rows for name in row.scores)),
        rows,
        _group(rows, rule),
    )


def _rank(
    items: list[_Item], scores: Sequence[Mapping[str, float]], rule: BestRule | None
) -> list[_Item]:
    """Return the best first, and then those without the score that decides."""
    if rule is None or rule.metric is None or rule.mode is None:
        return items
    scored = [(each.get(rule.metric, math.nan), n) for n, each in enumerate(scores)]
    ranked = rank_by_score(scored, rule.mode)
    return [items[n] for n in (*ranked, *(n for n in range(len(items)) if n not in ranked))]


def _find_differences(runs: Sequence[RunFacts]) -> dict[str, list[str]]:
    """Return the values in each run of what differs, by name."""
    hidden = {*_HIDDEN, *_ALSO_HIDDEN}
    tables = [
        {
            name: _shorten(value)
            for topic in _TOPICS
            for name, value in flatten({topic: run.facts.get(topic, {})})
            if name not in hidden
        }
        for run in runs
    ]
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "-") for table in tables]
        is_known = any(_end(name) == _end(other) and values == x for other, x in found.items())
        if len(set(values)) > 1 and not is_known:
            found[name] = values
    lengths = ["-" if (x := run.find_last_iteration()) is None else str(x) for run in runs]
    if len(set(lengths)) > 1:
        found["iterations"] = lengths
    return {_end(x) if [*map(_end, found)].count(_end(x)) == 1 else x: found[x] for x in found}


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _group(rows: Sequence[ComparedRun], rule: BestRule | None) -> list[ScoreGroup]:
    """Return mean and standard deviation of runs that differ in their seeds only."""
    members: dict[tuple[str, ...], dict[tuple[str, ...], ComparedRun]] = {}
    for row in rows:
        sides: tuple[list[str], list[str]] = ([], [])
        for name, value in row.settings.items():
            sides[_end(name).endswith("seed")].append(value)
        members.setdefault(tuple(sides[0]), {}).setdefault(tuple(sides[1]), row)
    found = []
    for each in members.values():
        group = [*each.values()]
        if len(group) < 2:
            continue
        shared = {x: y for x, y in group[0].settings.items() if not _end(x).endswith("seed")}
        made = ScoreGroup(shared, [row.run for row in group])
        for name in group[0].scores:
            values = [row.scores.get(name, math.nan) for row in group]
            if all(abs(value) < _MOST for value in values):
                made.means[name] = statistics.fmean(values)
                made.deviations[name] = statistics.stdev(values)
        found.append(made)
    return _rank(found, [group.means for group in found], rule)


def plot_runs(runs: Mapping[str, RunFacts], target: Path) -> None:
    """Write a picture of the curves of runs over each other.

    Raises:
        ArgumentError: for a suffix that names no format.
        LedgerError: if a ledger cannot be read.
    """
    # Only this needs matplotlib.
    from helios.reports.charts import MOST_CHARTS, draw_over

    found = {name: read_curves(run) for name, run in runs.items()}
    titles: dict[str, dict[str, Any]] = {}
    for name, curves in found.items():
        for title, curve in curves.list_curves(MOST_CHARTS).items():
            titles.setdefault(title, {})[name] = curve
    draw_over(titles, target)

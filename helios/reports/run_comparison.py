"""Compares runs: their differences and their scores, the best first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from helios.best import BestRule, rank_by_score
from helios.ledger.run_file import RunFacts, find_differences, find_runs, read_run

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
    """Runs that differ only in their seeds.

    Attributes:
        settings: the settings that set them apart from other groups.
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
        by: the rule for the best validation; ``None`` if the runs have different ones.
        shown: which scores these are.
        settings: names of what differs.
        scores: names of the scores.
        rows: the runs, the best first; in the given order if they have no rule in common.
        groups: runs that differ only in their seeds, the best mean first.
    """

    by: str | None
    shown: str
    settings: list[str]
    scores: list[str]
    rows: list[ComparedRun]
    groups: list[ScoreGroup]


def read_runs(places: Sequence[str | Path]) -> dict[str, RunFacts]:
    """Return the records of runs by name: that of the folder, or the path if names repeat.

    Raises:
        LedgerError: if a run has no files, or if one cannot be read.
    """
    found = [read_run(folder) for place in places for folder in find_runs(place)]
    names = [run.name for run in found]
    return {str(run.folder) if names.count(run.name) > 1 else run.name: run for run in found}


def compare_runs(runs: Mapping[str, RunFacts]) -> RunComparison:
    """Compare runs by their settings and their scores."""
    differences = find_differences(list(runs.values()))
    settings = {name: [*map(_shorten, values)] for name, values in differences.items()}
    bests = [run.best for run in runs.values()]
    rules = {best.rule for best in bests if best is not None}
    rule = rules.pop() if len(rules) == 1 else None
    shown = f"best validation by {rule}"
    if rule is None:
        shown = "last validation, in the given order: no rule of the best is common to all"
    rows = []
    for number, (name, run, best) in enumerate(zip(runs, runs.values(), bests, strict=True)):
        scores = run.find_last_scores() if rule is None else best.scores if best is not None else {}
        own = {key: values[number] for key, values in settings.items()}
        rows.append(ComparedRun(name, own, dict(scores)))
    if not any(row.scores for row in rows):
        shown = "last iteration, in the given order: its losses"
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


def _shorten(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _group(rows: Sequence[ComparedRun], rule: BestRule | None) -> list[ScoreGroup]:
    """Return mean and standard deviation of runs that differ in their seeds only."""
    members: dict[tuple[str, ...], dict[tuple[str, ...], ComparedRun]] = {}
    for row in rows:
        sides: tuple[list[str], list[str]] = ([], [])
        for name, value in row.settings.items():
            sides[name.endswith("seed")].append(value)
        members.setdefault(tuple(sides[0]), {}).setdefault(tuple(sides[1]), row)
    found = []
    for each in members.values():
        group = [*each.values()]
        if len(group) < 2:
            continue
        shared = {x: y for x, y in group[0].settings.items() if not x.endswith("seed")}
        made = ScoreGroup(shared, [row.run for row in group])
        for name in group[0].scores:
            values = [row.scores.get(name, math.nan) for row in group]
            if all(abs(value) < _MOST for value in values):
                made.means[name] = statistics.fmean(values)
                made.deviations[name] = statistics.stdev(values)
        found.append(made)
    return _rank(found, [group.means for group in found], rule)


def plot_runs(runs: Mapping[str, RunFacts], target: Path) -> None:
    """Plot the curves of runs over each other.

    Raises:
        ArgumentError: for a suffix of no known format.
        LedgerError: if a ledger cannot be read.
    """
    # Only this needs matplotlib.
    from helios.reports.charts import MOST_CHARTS, draw_over, read_curves

    found = {name: read_curves(run) for name, run in runs.items()}
    titles: dict[str, dict[str, Any]] = {}
    for name, curves in found.items():
        for title, curve in curves.list_curves(MOST_CHARTS).items():
            titles.setdefault(title, {})[name] = curve
    draw_over(titles, target)

"""A comparison of runs as a document: tables, and a picture of each number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from helios.core.text import number_text
from helios.ledger.run_comparison import RunComparison, Sweep
from helios.ledger.summary.document import (
    Block,
    Chapter,
    Document,
    Grid,
    Sample,
    Spread,
    Text,
)
from helios.ledger.summary.estimates import Estimate
from helios.ledger.summary.page import write_page

HEAD = ("number", "group", "runs", "mean", "deviation", "95% interval")
"""The columns of :func:`list_estimates`."""


def list_estimates(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Return a row for each number and group."""
    return [
        (name, group, *describe_estimate(each))
        for name, table in comparison.estimates.items()
        for group, each in table.items()
    ]


def describe_estimate(found: Estimate) -> tuple[str, str, str, str]:
    """Return count, mean, deviation and interval as texts."""
    interval = "-"
    if found.interval is not None:
        interval = " to ".join(map(number_text, found.interval))
    deviation = "-" if found.deviation is None else number_text(found.deviation)
    return str(len(found.values)), number_text(found.mean), deviation, interval


def write_comparison(comparison: RunComparison) -> str:
    """Return the text of an HTML file."""
    sections = [
        Chapter("Results", list(_show_results(comparison))),
        Chapter("Differences between the runs", list(_show_varying(comparison))),
        Chapter("Differences of pairs", list(_show_paired(comparison))),
        Chapter("Parts of the variance", list(_show_parts(comparison))),
        Chapter("Notes", [Text(f"{note}.") for note in comparison.notes] or [Text("None.")]),
    ]
    title = f"{len(comparison.runs)} runs"
    if comparison.by is not None:
        title += f" by {comparison.by}"
    page = write_page(Document(title, "Comparison of training runs", sections))
    return page.encode("utf-8", "replace").decode()


def list_sweep(sweep: Sweep) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heading and the rows of a sweep, the best run first."""
    names = [name.removeprefix("params.").removeprefix("found.") for name in sweep.parameters]
    if len({*names, *sweep.scores}) < len(names) + len(sweep.scores):
        names = sweep.parameters
    rows = [
        (row.run, *row.parameters, *(_show_score(row.scores.get(name)) for name in sweep.scores))
        for row in sweep.rows
    ]
    return ("run", *names, *sweep.scores), rows


def _show_score(score: float | None) -> str:
    return "-" if score is None else number_text(score)


def describe_sweep(sweep: Sweep) -> str:
    """Return what the scores of a sweep are, and their order."""
    if sweep.by is None:
        return "The scores are the last ones: the runs have no best validation by one score."
    return f"The scores are those of each run's best validation by {sweep.by}, the best run first."


def _show_results(comparison: RunComparison) -> Iterator[Block]:
    if comparison.sweep is not None:
        yield Grid(*list_sweep(comparison.sweep))
        yield Text(describe_sweep(comparison.sweep))
        yield Text("Their hyper-parameters differ, so there is no mean of them.")
        return
    yield Grid(HEAD, list_estimates(comparison))
    yield Text(
        "Each dot is a run, the vertical line the mean, the area the 95% interval of the mean by "
        "Student's t, which assumes independent runs."
    )
    for name, table in comparison.estimates.items():
        yield _draw(name, table)


def _draw(name: str, table: Mapping[str, Estimate]) -> Spread:
    return Spread(
        name,
        [
            Sample(group, list(each.values.values()), each.mean, each.interval)
            for group, each in table.items()
        ],
    )


def _show_varying(comparison: RunComparison) -> Iterator[Block]:
    if not comparison.varying:
        yield Text("None that may change the training, as far as the manifests say.")
        return
    rows = [(name, *values) for name, values in comparison.varying.items()]
    yield Grid(("what", *comparison.runs), rows)


def _show_paired(comparison: RunComparison) -> Iterator[Block]:
    if not comparison.paired:
        yield Text("None, see the notes." if comparison.by else "None: the runs are one group.")
        return
    yield Text(f"{describe_pairs(comparison)}, run by run of equal seeds.")
    rows = [(name, *describe_estimate(each)) for name, each in comparison.paired.items()]
    yield Grid(("number", "pairs", *HEAD[3:]), rows)
    for name, each in comparison.paired.items():
        yield _draw(name, {"difference": each})


def describe_pairs(comparison: RunComparison) -> str:
    """Return which group is subtracted from which one."""
    first, second = comparison.groups
    return f"{comparison.by}: {first} minus {second}"


def _show_parts(comparison: RunComparison) -> Iterator[Block]:
    if not comparison.parts:
        yield Text("None, see the notes.")
        return
    rows = [row for name in comparison.parts for row in list_parts(comparison, name)]
    yield Grid(("number", "part", "variance", "share"), rows)


def list_parts(comparison: RunComparison, name: str) -> list[tuple[str, str, str, str]]:
    """Return a row for each part of the variance of a number."""
    found = comparison.parts[name]
    parts = {**found.variances, "rest": found.rest}
    total = sum(parts.values())
    return [
        (name, part, number_text(value), f"{value / total:.0%}" if total else "-")
        for part, value in parts.items()
    ]

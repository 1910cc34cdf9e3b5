"""``helios compare``: the results of several runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from helios.cli import output
from helios.cli.output import Column
from helios.cli.report import find_target
from helios.reports.factors import is_repeated
from helios.reports.run_comparison import (
    HEAD,
    RunComparison,
    compare,
    describe_estimate,
    describe_pairs,
    describe_sweep,
    list_estimates,
    list_parts,
    list_sweep,
    write_comparison,
)
from helios.storage import files

DESCRIPTION = """\
Compare the results of several runs: for the last and the best validation scores
and the losses of the last iteration, the mean, the standard deviation and the
95% interval of the mean by Student's t; and which options and seeds differ.

Where hyper-parameters differ other than in seeds, the runs are listed instead,
the best one first, with what differs and their scores.

--by groups the runs. If there are two groups whose seeds match one to one, the
difference of the pairs is shown, too. Parts of the variance are shown if every
level of each seed or group was combined with all levels of the others.

Exit code 0: compared. 2: wrong usage, or a run has no evidence.
"""

_MOST_ROWS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    # Versions of Python write several arguments of one name in different ways.
    parser.usage = "%(prog)s RUN RUN [RUN ...] [options]"
    parser.add_argument("folders", nargs="+", metavar="RUN", help="the folders of the runs")
    parser.add_argument(
        "--by",
        metavar="NAME",
        help="an argument of the command, an option, or an entry or topic of run.json",
    )
    parser.add_argument("--html", metavar="FILE", help="also write an HTML file with pictures")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Compare; 0 if the runs could be read.

    Raises:
        LedgerError: if a run has no evidence, or if its files cannot be read.
    """
    target = None
    if namespace.html is not None:
        target = find_target(namespace.html, Path(), "compare", suffixes=(".html", ".htm"))
    found = compare(*namespace.folders, by=namespace.by)
    if target is not None:
        files.write_text_durably(target, write_comparison(found))
    if namespace.json:
        output.print_json(found.as_dict())
    else:
        output.print_lines(*_lines(found))
    return 0


def _lines(found: RunComparison) -> Iterator[str]:
    columns = [Column(name, is_right=name in HEAD[2:5]) for name in HEAD]
    if found.sweep is not None:
        names, runs = list_sweep(found.sweep)
        yield from output.table([Column(names[0]), *_right(names[1:])], runs)
        yield describe_sweep(found.sweep)
    else:
        yield from output.table(columns, list_estimates(found))
    if found.paired:
        yield f"pairs of equal seeds, {describe_pairs(found)}:"
        yield from _indent(
            output.table(
                [Column("number"), Column("pairs", is_right=True), *columns[3:]],
                [(name, *describe_estimate(each)) for name, each in found.paired.items()],
            )
        )
    if found.parts:
        yield "parts of the variance:"
        head = [Column("number"), Column("part"), Column("variance"), Column("share")]
        parts = [row for name in found.parts for row in list_parts(found, name)]
        yield from _indent(output.table(head, parts))
    shown = {} if found.sweep is None else {x: found.varying[x] for x in found.sweep.parameters}
    varying = [
        (name, *values)
        for name, values in found.varying.items()
        if not is_repeated(name, values, shown)
    ]
    if varying:
        yield "the runs differ in:" if found.sweep is None else "the runs also differ in:"
        head = [Column("what"), *map(Column, found.runs)]
        yield from _indent(output.table(head, varying[:_MOST_ROWS]))
        if len(varying) > _MOST_ROWS:
            yield f"  and {len(varying) - _MOST_ROWS} more, see --json"
    for note in found.notes:
        yield f"note: {note}."


def _right(names: Sequence[str]) -> list[Column]:
    return [Column(name, is_right=True) for name in names]


def _indent(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"

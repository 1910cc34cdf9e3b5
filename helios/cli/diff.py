"""``helios diff``: the first iteration in which two runs differ, and in what."""

from __future__ import annotations

import argparse
from typing import Any

from helios.cli import output
from helios.errors import LedgerError, UsageError
from helios.ledger.differences import Difference, diff

NAME = "diff"
SUMMARY = "find the first iteration in which two runs differ"
DESCRIPTION = """\
Compare the ledgers of two runs line by line: the first iteration that differs,
what differs in it, the earliest first, and what may have caused that.

Exit code 0: both are equal. 1: they differ. 2: wrong usage, or one of them has
no ledger that can be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the command its arguments."""
    for name in ("first", "second"):
        parser.add_argument(name, metavar="RUN", help="the folder of a run, or its ledger")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Compare; 0 if both are equal, 1 if they differ.

    Raises:
        UsageError: if one of them has no ledger that can be read.
    """
    try:
        found = diff(namespace.first, namespace.second)
    except LedgerError as error:
        raise UsageError(str(error)) from error
    if namespace.json:
        output.print_json(found.as_dict())
    else:
        output.print_lines(*_lines(found))
    return 0 if found.is_equal else 1


def _lines(found: Difference) -> list[str]:
    if found.is_equal:
        return [f"equal: {found.num_equal} iterations, and what the ledgers say of their end"]
    lines = []
    if not found.has_same_definition:
        lines.append("The runs have different definitions: options, seed or data differ.")
    if found.iteration is None:
        first, second = found.lengths
        return [
            *lines,
            f"equal up to iteration {found.num_equal}; one has {first} iterations, the "
            f"other one {second}",
        ]
    lines.append(f"different from iteration {found.iteration} on, first in: {found.what[0]}")
    if found.what[1:]:
        lines.append(f"then in: {', '.join(found.what[1:])}")
    lines += [
        f"  {name}: {_show(one)} | {_show(other)}" for name, (one, other) in found.details.items()
    ]
    return [*lines, "possible causes:", *(f"  - {cause}" for cause in found.causes)]


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number!r}" for name, number in value.items())
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return "-" if value is None else str(value)

"""``helios verify``: whether the bytes of checkpoints are those that were written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from helios.checkpoint.status import Checked, Condition, Depth, Status, examine, survey
from helios.cli import output
from helios.errors import ArgumentError

NAME = "verify"
SUMMARY = "compare checkpoints with their digests"
DESCRIPTION = """\
Read checkpoints completely and compare them with the digests in their sidecars,
or with the checksums of their containers if there is no digest. Folders are
searched recursively, except for files that were put aside: damaged files, and
folders named before-*.

Exit code 0: all are good. 1: at least one is not. 2: wrong usage, or a folder
without checkpoints.
"""

_HOW = {
    Checked.DIGEST: "digest",
    Checked.SUMS: "no digest to compare; the container's checksums match",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the command its arguments."""
    parser.add_argument("path", metavar="FILE|DIR", help="a checkpoint, or a folder of them")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Verify; 0 if all are good, 1 if one is not.

    Raises:
        ArgumentError: if there is nothing to verify.
    """
    given = Path(namespace.path)
    root = given if given.is_dir() else output.existing_file(namespace.path)
    found = []
    for status in _examine(root):
        found.append(status)
        if not namespace.json:
            output.print_lines(_line(status))
    if not found:
        raise ArgumentError(f"There must be a checkpoint to verify, got none in {root}.")
    is_good = all(status.is_good for status in found)
    if namespace.json:
        documents = [output.status_document(status) for status in found]
        output.print_json({"root": str(root), "is_good": is_good, "files": documents})
    return 0 if is_good else 1


def _examine(root: Path) -> Iterator[Status]:
    if not root.is_dir():
        yield examine(root, Depth.BYTES)
        return
    for folder in survey(root, Depth.BYTES, with_moved_aside=False):
        yield from (part for part in folder.files if part.condition is not Condition.ASIDE)


def _line(status: Status) -> str:
    if not status.is_good:
        return f"{status.condition.value:10}  {status.reason}"
    needs = f"; refers to {', '.join(status.needs)}" if status.needs else ""
    return f"{status.condition.value:10}  {status.path} ({_HOW[status.checked]}{needs})"

"""``helios report``: a run as one HTML file, or as a Markdown appendix."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from helios.checkpoint.folder_status import examine_folder
from helios.checkpoint.status import Condition, Status
from helios.cli import output
from helios.core.local_paths import as_local_path
from helios.errors import ArgumentError
from helios.ledger.run_facts import find_run
from helios.reports.run_report import report
from helios.storage import files

DESCRIPTION = """\
Write a report of a run: losses, learning rate, throughput, scores, starts and
kills, environment, options, checkpoints, and a reproducibility checklist. The
file needs no network, script or other file. What Helios cannot know is left
empty for the author.

The default file is report.html in the folder of the run, or report.md with
--md; it is overwritten.

Exit code 0: the file is written. 2: wrong usage, or the run has no evidence.
"""

_SUFFIXES = {True: (".md",), False: (".html", ".htm")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, or its ledger")
    parser.add_argument("--out", metavar="FILE", help="the file to write")
    parser.add_argument("--md", action="store_true", help="write Markdown instead of HTML")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Write the report; 0 when the file is on the disk.

    Raises:
        LedgerError: if there is no run, or if its files cannot be read.
        ArgumentError: for an unsuitable name of the file.
    """
    folder = find_run(namespace.folder)
    target = find_target(namespace.out, folder, "report", suffixes=_SUFFIXES[namespace.md])
    found = report(folder, list_checkpoint_facts(folder))
    files.write_text_durably(target, found.markdown if namespace.md else found.html)
    if namespace.json:
        output.print_json({"path": str(target), **found.as_dict()})
    else:
        output.print_lines(f"Wrote {target}.")
    return 0


def find_target(given: str | None, folder: Path, stem: str, *, suffixes: tuple[str, ...]) -> Path:
    """Return the file to write.

    Args:
        given: the argument of ``--out``; ``None`` for a file in ``folder``.
        folder: the folder of the run.
        stem: the default name, without suffix.
        suffixes: which names may have, the default first.

    Raises:
        ArgumentError: if it could replace a file of another kind, or has no folder.
    """
    target = folder / f"{stem}{suffixes[0]}" if given is None else as_local_path("FILE", given)
    if target.suffix not in suffixes:
        raise ArgumentError(
            f"The name of the file must end in {' or '.join(suffixes)}, so that no file of the run "
            f"is overwritten, got {target}. Choose another name."
        )
    if not target.parent.is_dir():
        raise ArgumentError(f"There must be a folder for the file, got {target}. Create it.")
    return target


def list_checkpoint_facts(folder: Path) -> list[dict[str, Any]]:
    """Return facts about each checkpoint in the folder of a run."""
    found = examine_folder(folder).files
    return [_describe(status) for status in found if status.condition is not Condition.ASIDE]


def _describe(status: Status) -> dict[str, Any]:
    sidecar = status.sidecar
    digest = {} if sidecar is None else {"digest": sidecar.digest}
    return {"name": status.path.name, **output.status_document(status), **digest}

"""The migrator: converts checkpoints of helios-ml and of older formats to the current one.

``python -m helios.chkpt_migrator ROOT``, ``python -m chkpt_migrator ROOT`` and ``helios migrate
ROOT`` are the same command. Nothing from a file is executed, and a kill loses nothing: run the same
command again to continue. A second run changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from helios.core.local_paths import as_local_path
from helios.errors import ArgumentError, CheckpointError
from helios.migration.folder_migration import (
    BACKUP_FOLDER,
    Migration,
    Report,
    Result,
    find_candidates,
)

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

DESCRIPTION = "Migrate all checkpoints below a folder to the current format, in place."

_WIDTH = 80
_EPILOG = """\
Files of other programs, links and saves in progress are listed and left alone.
Exit codes: 0 success, 1 a file is damaged, was refused or could not be
migrated, 2 wrong usage.
"""


def migrate_checkpoints_to_current_version(root: Path) -> None:
    """Migrate every ``*.pth`` file directly in a folder to the current format.

    Files keep their names and paths, and the old ones are not kept; the command keeps them. Types
    that you have added with ``torch.serialization.add_safe_globals`` may be in the files.

    Args:
        root: the folder.

    Raises:
        ArgumentError: if there is no such folder.
        CheckpointError: if a file is damaged, was refused or could not be migrated; the others
            are migrated by then.
    """
    folder = as_local_path("migrate_checkpoints_to_current_version(root=...)", root)
    if not folder.is_dir():
        raise ArgumentError(
            "migrate_checkpoints_to_current_version(root=...) must be a folder that exists, got "
            f"{root}. Pass the folder that holds the checkpoints."
        )
    migration = Migration(backs_up=False)
    reports = [migration.migrate(path) for path in find_candidates(folder, is_recursive=False)]
    failures = [_describe(report) for report in reports if report.result.is_failure]
    if failures:
        raise CheckpointError(
            f"{len(failures)} of {len(reports)} files in {folder} could not be migrated: "
            f"{'; '.join(failures)}."
        )


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no monitor thread


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command, for :func:`run`."""
    parser.add_argument("root", metavar="ROOT", help="a folder, or one file")
    parser.add_argument(
        "--dry-run", action="store_true", help="report what would be done, and write nothing"
    )
    parser.add_argument(
        "--backup",
        action="store_true",
        default=True,
        help=f"keep each old file in a folder {BACKUP_FOLDER} beside it (the default)",
    )
    parser.add_argument("--no-backup", action="store_false", dest="backup", help="keep no backups")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the command, and print the result for each file.

    Args:
        namespace: the parsed arguments, from a parser with :func:`add_arguments`.

    Returns:
        The exit code: 1 if there may be a checkpoint that no start can use yet, else 0.

    Raises:
        ArgumentError: if ROOT is a URL or does not exist.
    """
    root = as_local_path("ROOT", namespace.root)
    if not root.exists():
        raise ArgumentError(f"No such folder or file: {root}.")
    migration = Migration(is_dry=namespace.dry_run, backs_up=namespace.backup)
    paths = list(find_candidates(root)) if root.is_dir() else [root]
    with _Bar(paths, unit="file", leave=False, disable=None) as bar:
        reports = [migration.migrate(path) for path in bar]
    if namespace.json:
        _print(json.dumps(_document(root, reports), indent=2))
    else:
        _print(*_summary(reports))
    return FAILED if any(report.result.is_failure for report in reports) else 0


def _document(root: Path, reports: Iterable[Report]) -> dict[str, Any]:
    table = [
        {
            "path": str(report.path),
            "result": report.result.value,
            "reason": report.reason,
            "backup": None if report.backup is None else str(report.backup),
        }
        for report in reports
    ]
    return {"root": str(root), "counts": _count(reports), "files": table}


def _count(reports: Iterable[Report]) -> dict[str, int]:
    counts = Counter(report.result for report in reports)
    return {result.value: counts[result] for result in Result if counts[result]}


def _summary(reports: Sequence[Report]) -> list[str]:
    lines = []
    for result in Result:
        found = [report for report in reports if report.result is result]
        if found:
            lines += [f"{result.value}:", *(f"  {_describe(report)}" for report in found)]
    counts = [f"{count} {name}" for name, count in _count(reports).items()]
    return [*lines, f"{', '.join(counts) or 'There is no checkpoint here'}."]


def _describe(report: Report) -> str:
    notes = [report.reason] if report.reason else []
    notes += [f"the old file is {report.backup}"] if report.backup is not None else []
    return f"{report.path}{': ' if notes else ''}{'; '.join(notes)}"


def _print(*lines: str) -> None:
    # A name may contain any character, which the terminal may not support.
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        text = line if line.replace("\n", "").isprintable() else ascii(line)
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _make_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=_WIDTH)


def build_migrator_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m helios.chkpt_migrator",
        description=DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_make_formatter,
    )
    add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    namespace = build_migrator_parser().parse_args(argv)
    try:
        return run(namespace)
    except ArgumentError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. Migrated files stay; run the same command to continue.\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""``helios migrate``: files of helios-ml in, files of the current format out."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helios.cli import output
from helios.cli.output import Answer, Command, argument
from helios.errors import ArgumentError
from helios.migration.folder_migration import (
    BACKUP_FOLDER,
    Migration,
    Report,
    Result,
    find_candidates,
)
from helios.storage.local_paths import as_local_path

_MIGRATE = "Migrate all checkpoints below a folder to the current format, in place."


def migrate(namespace: argparse.Namespace) -> Answer:
    """Migrate; the code is 1 if there may be a checkpoint that no start can use yet.

    Raises:
        ArgumentError: if ROOT is a URL or does not exist.
    """
    root = as_local_path("ROOT", namespace.root)
    if not root.exists():
        raise ArgumentError(f"No such folder or file: {root}.")
    migration = Migration(is_dry=namespace.dry_run, backs_up=namespace.backup)
    paths = list(find_candidates(root)) if root.is_dir() else [root]
    reports = []
    with output.progress("migrate", len(paths), unit=" files") as watch:
        for path in paths:
            reports.append(migration.migrate(path))
            watch(1)
    is_failure = any(report.result.is_failure for report in reports)
    return Answer(_summary(reports), partial(_document, root, reports), lambda: int(is_failure))


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
            lines += [f"{result.value}:", *(f"  {report}" for report in found)]
    counts = [f"{count} {name}" for name, count in _count(reports).items()]
    return [*lines, f"{', '.join(counts) or 'There is no checkpoint here'}."]


COMMANDS = {
    "migrate": Command(
        _MIGRATE,
        (
            argument("root", metavar="ROOT", help="a folder, or one file"),
            argument(
                "--dry-run",
                action="store_true",
                help="report what would be done, and write nothing",
            ),
            argument(
                "--backup",
                action="store_true",
                default=True,
                help=f"keep each old file in a folder {BACKUP_FOLDER} beside it (the default)",
            ),
            argument("--no-backup", action="store_false", dest="backup", help="keep no backups"),
        ),
        migrate,
    )
}

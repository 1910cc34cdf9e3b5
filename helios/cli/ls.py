"""``helios ls``: list checkpoints, and show where a start would resume."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from helios.checkpoint.folder_status import FolderStatus, StartOutcome, survey
from helios.checkpoint.reproducibility import list_missing
from helios.checkpoint.retention import Ranking, rank_files
from helios.checkpoint.status import Condition, Depth, Status
from helios.cli import output
from helios.cli.output import Column
from helios.core.stored_values import list_values, stored_arguments, stored_params
from helios.core.text import size_text, with_step

DESCRIPTION = """\
List the checkpoints of a run's folder, or of all runs below chkpt_root.

States: good, damaged, unmigrated (of helios-ml), newer (a later format),
foreign (not a checkpoint of Helios), unreadable (disk or permissions), put
aside (found damaged at an earlier start). A star marks the file from which fit
would resume, an exclamation mark the one at which it would stop with an error.

Without --verify, good means that the container is intact, and that name and
sidecar agree; the content is read only if there is no sidecar.
"""

_COLUMNS = (
    Column(""),
    Column("file"),
    Column("epoch", is_right=True),
    Column("iteration", is_right=True),
    Column("size", is_right=True),
    Column("state"),
    Column("metrics", rank=1),
    Column("level", rank=3),
    Column("finished", rank=2),
)
_MAX_REASONS = 3
_MARKS = {StartOutcome.RESUMES: "*", StartOutcome.REFUSES: "!", StartOutcome.FRESH: ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("folder", metavar="DIR", help="folder of a run, or chkpt_root")
    parser.add_argument(
        "--verify", action="store_true", help="read all files and compare their digests"
    )
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """List, and return 0: damaged files are a result, not a failure."""
    root = output.existing_folder(namespace.folder)
    folders = list(survey(root, Depth.BYTES if namespace.verify else Depth.GLANCE))
    if namespace.json:
        documents = [_document(folder) for folder in folders]
        output.print_json({"root": str(root), "folders": documents})
        return 0
    if not folders:
        output.print_lines(f"There are no checkpoints in {root}.")
    for number, folder in enumerate(folders):
        output.print_lines(*([""] if number else []), *_lines(folder, root))
    return 0


def _document(folder: FolderStatus) -> dict[str, Any]:
    start = None if folder.start is None else str(folder.start)
    return {
        "path": str(folder.path),
        "is_moved_aside": folder.is_moved_aside,
        "start": None if folder.is_moved_aside else folder.outcome.value,
        "start_path": None if folder.is_moved_aside else start,
        "params": stored_params(_newest_options(folder)),
        "found": stored_arguments(_newest_options(folder)),
        "best": _best_document(rank_files(folder.files)),
        "files": [output.status_document(status) for status in folder.files],
    }


def _lines(folder: FolderStatus, root: Path) -> list[str]:
    title = str(root / folder.path.relative_to(root))
    if folder.is_moved_aside:
        title += "  (moved aside; starts ignore it)"
    rows = [_row(status, folder) for status in folder.files]
    lines = [title, *_values(folder), *output.table(_COLUMNS, rows, output.terminal_width())]
    if not folder.is_moved_aside:
        lines += [*_best(folder), *_reasons(folder), *_losses(folder)]
    if (
        folder.outcome is StartOutcome.REFUSES
        and folder.start is None
        and not folder.is_moved_aside
    ):
        lines.append("A start of fit stops with an error: all checkpoints here are damaged.")
    return lines


def _values(folder: FolderStatus) -> list[str]:
    """Return what the newest checkpoint says that the run is declared with, and was given."""
    options = _newest_options(folder)
    known = {"params": stored_params(options), "found": stored_arguments(options)}
    return output.facts({name: list_values(table) for name, table in known.items() if table})


def _newest_options(folder: FolderStatus) -> dict[str, Any]:
    sidecars = [each.sidecar for each in folder.files if each.sidecar is not None]
    return max(sidecars, key=lambda each: (each.epoch, each.iteration)).options if sidecars else {}


def _best(folder: FolderStatus) -> list[str]:
    """Return the best validation of the run, and the best checkpoint."""
    ranking = rank_files(folder.files)
    if ranking.best is None:
        return []
    if not ranking.lacks_best:
        return [f"best: {ranking.best}: {ranking.entries[0].path.name}"]
    name = "none" if ranking.path is None else ranking.path.name
    return [f"best: {ranking.best}, without a checkpoint; best checkpoint: {name}"]


def _best_document(ranking: Ranking) -> dict[str, Any] | None:
    if ranking.best is None:
        return None
    path = None if ranking.path is None else str(ranking.path)
    return {**ranking.best.as_plain(), "path": path, "has_checkpoint": not ranking.lacks_best}


def _reasons(folder: FolderStatus) -> list[str]:
    """Return why files are not good; equal reasons are listed a few times only."""
    lines: list[str] = []
    for condition in Condition:
        reasons = [part.reason for part in folder.files if part.condition is condition]
        if condition is Condition.ASIDE:
            continue
        lines += filter(None, reasons[:_MAX_REASONS])
        if condition is not Condition.GOOD and len(reasons) > _MAX_REASONS:
            lines.append(f"{len(reasons) - _MAX_REASONS} more are {condition.value}.")
    return lines


def _losses(folder: FolderStatus) -> list[str]:
    """Return what checkpoints lack, newest first; repeated only for the newest."""
    found: dict[str, str] = {}
    for status in reversed(folder.files):
        if status.sidecar is not None and status.sidecar.missing:
            found.setdefault(list_missing(status.sidecar.missing), status.path.name)
    texts = [f"{name} lacks {text}." for text, name in found.items()]
    return texts[:_MAX_REASONS]


def _row(status: Status, folder: FolderStatus) -> tuple[str, ...]:
    place = ("", "")
    if status.place is not None:
        epoch, iteration = status.place
        place = str(epoch), with_step(iteration, status.step)
    sidecar = status.sidecar
    is_start = status.path == folder.start and not folder.is_moved_aside
    return (
        _MARKS[folder.outcome] if is_start else "",
        status.path.name,
        *place,
        size_text(status.size),
        status.condition.value,
        "" if sidecar is None else output.metrics_text(sidecar.metrics),
        "" if sidecar is None else ", ".join([sidecar.level, *sidecar.claims]),
        "" if sidecar is None else sidecar.finished or "",
    )

"""Moves the checkpoints of a run aside, for one that starts anew."""

from __future__ import annotations

from pathlib import Path

from helios.checkpoint import file_names
from helios.storage import files

# What a run records of itself, also of earlier starts.
_EVIDENCE = (
    *("ledger*.jsonl", "lineage.jsonl", "timing.jsonl"),
    *("run.json", "run.before-*.json", "rewinds*.json", "stacks-rank-*.txt"),
)


def move_aside(folder: Path, clock_text: str, *, keep: Path | None) -> Path | None:
    """Move all checkpoints, damaged files and evidence to ``before-<clock_text>/``.

    Args:
        folder: the folder of the run.
        clock_text: date and time, as part of a file name.
        keep: a checkpoint that is not moved.

    Returns:
        The new folder, or ``None`` if there was nothing to move.
    """
    kept = None if keep is None else keep.resolve()
    present = [path for path in file_names.list_checkpoints(folder) if path.resolve() != kept]
    pairs = [(path, file_names.sidecar_path(path)) for path in present]
    moved = [path for pair in pairs for path in pair if path.exists()]
    moved += find_damaged(folder)
    if not moved:
        return None
    moved += [path for pattern in _EVIDENCE for path in sorted(folder.glob(pattern))]
    target, number = folder / f"before-{clock_text}", 1
    while target.exists():
        number += 1
        target = folder / f"before-{clock_text}-{number}"
    files.make_folder(target)
    for path in moved:
        files.replace(path, target / path.name)
    files.fsync_folder(target)
    files.fsync_folder(folder)
    return target


def find_damaged(folder: Path) -> list[Path]:
    """Return what was renamed as damaged in a folder; nothing if there is no folder."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if file_names.is_damaged(path)]

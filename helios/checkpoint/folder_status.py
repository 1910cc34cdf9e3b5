"""Examines all checkpoints of a folder, and says what a start of ``fit`` would do with them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from helios.checkpoint import file_names
from helios.checkpoint.status import Condition, Status, examine
from helios.errors import CheckpointError

_MOVED_ASIDE = "before-"


class StartOutcome(Enum):
    """What a start of ``fit`` would do with a folder."""

    RESUMES = "resumes"
    REFUSES = "refuses"
    FRESH = "fresh"


@dataclasses.dataclass(frozen=True)
class FolderStatus:
    """Facts about the checkpoints directly in one folder.

    Attributes:
        path: the folder.
        files: its checkpoints, oldest first, then those that were renamed as damaged.
        start: the checkpoint that a start of ``fit`` would load, or fail at.
        outcome: what that start would do.
    """

    path: Path
    files: tuple[Status, ...]
    start: Path | None
    outcome: StartOutcome

    @property
    def is_moved_aside(self) -> bool:
        """Whether ``resume="never"`` or a migration has moved these here; starts ignore them."""
        return _is_before(self.path.name)


def _is_before(name: str) -> bool:
    return name.startswith(_MOVED_ASIDE)


def examine_folder(folder: Path, look: Callable[[Path], Status] = examine) -> FolderStatus:
    """Examine the checkpoints directly in a folder.

    Args:
        folder: the folder of one run.
        look: examines a file. What a start would do is determined as far as it looks.

    Raises:
        CheckpointError: if a running training deletes the checkpoints faster than they can be read.
    """
    files = _examine_all(folder, look)
    damaged = filter(file_names.is_damaged_checkpoint, sorted(folder.iterdir()))
    aside = list(map(_put_aside, damaged))
    start, outcome = _find_start(files, has_damaged=bool(aside))
    return FolderStatus(folder, (*files, *aside), start, outcome)


def _examine_all(folder: Path, look: Callable[[Path], Status]) -> list[Status]:
    """Examine all checkpoints of a folder, and again if a run has deleted one meanwhile."""
    known: dict[Path, Status] = {}
    for paths in file_names.listings(folder):
        known |= {path: look(path) for path in paths if path not in known}
        files = [known[path] for path in paths]
        # A file that was intact when it was examined is reported, even if it was deleted since.
        if all(status.is_good or not file_names.is_gone(status.path) for status in files):
            break
    return files


def _put_aside(path: Path) -> Status:
    reason = f"{path} was found damaged at an earlier start."
    parts = path.iterdir() if path.is_dir() else [path]
    size = sum(part.stat().st_size for part in parts)
    return Status(path, Condition.ASIDE, reason, size=size, place=file_names.parse(path))


def _find_start(files: list[Status], *, has_damaged: bool) -> tuple[Path | None, StartOutcome]:
    for status in reversed(files):
        if status.is_good:
            return status.path, StartOutcome.RESUMES
        if status.condition is not Condition.DAMAGED:
            return status.path, StartOutcome.REFUSES
    # A silent fresh start with only damaged checkpoints would hide the loss of the run.
    return None, StartOutcome.REFUSES if files or has_damaged else StartOutcome.FRESH


def survey(
    root: Path, look: Callable[[Path], Status] = examine, *, with_moved_aside: bool = True
) -> Iterator[FolderStatus]:
    """Examine a folder and all folders below it, and yield those that hold checkpoints.

    Args:
        root: the folder of a run, or ``chkpt_root``.
        look: as in :func:`examine_folder`.
        with_moved_aside: include folders below it with files that were moved aside.

    Raises:
        CheckpointError: if a folder cannot be listed, and as in :func:`examine_folder`.
    """

    def refuse(error: OSError) -> None:
        raise CheckpointError(
            f"The folder {error.filename} cannot be listed: {error.strerror}. Check its "
            "permissions."
        ) from error

    for name, below, names in os.walk(root, onerror=refuse):
        below[:] = sorted(part for part in below if with_moved_aside or not _is_before(part))
        folder = Path(name)
        present = [folder / part for part in (*names, *below)]
        below[:] = [part for part in below if not file_names.is_folder(folder / part)]
        if any(map(_is_shown, present)):
            yield examine_folder(folder, look)


def _is_shown(path: Path) -> bool:
    is_named_so = file_names.is_checkpoint(path) or file_names.is_damaged_checkpoint(path)
    return is_named_so and file_names.is_present(path)

"""Examines checkpoints without loading them, and says what a start of ``fit`` would do with them.

The checks are those of :mod:`helios.checkpoint.loading`. Tensors are never loaded, not even to
verify every byte, so large files need little memory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.loading import (
    Check,
    Checked,
    Condition,
    Depth,
    FileChecks,
    checks_of,
    gone_text,
)
from helios.checkpoint.sidecar import Sidecar
from helios.errors import CheckpointError, DamagedCheckpointError, IncompatibleCheckpointError


@dataclasses.dataclass(frozen=True)
class Status:
    """Facts about one file.

    Attributes:
        path: the file.
        condition: what it means to a start of ``fit``.
        reason: why it is not good, in a sentence that names the file; empty if it is.
        size: its size in bytes.
        place: (epoch, iteration) in its name; ``None`` if there is none.
        sidecar: its sidecar, if there is one and it can be read.
        checked: how far its bytes were compared.
    """

    path: Path
    condition: Condition
    reason: str = ""
    size: int = 0
    place: tuple[int, int] | None = None
    sidecar: Sidecar | None = None
    checked: Checked = Checked.NOTHING

    @property
    def is_good(self) -> bool:
        """Whether no fault was found."""
        return self.condition is Condition.GOOD

    @property
    def state(self) -> str:
        """The condition in words; "not verified" if no fault was found, but not all was read."""
        is_verified = self.checked in (Checked.DIGEST, Checked.SUMS)
        return "not verified" if self.is_good and not is_verified else self.condition.value

    @property
    def step(self) -> int | None:
        """Optimizer steps at its safe point; ``None`` if unknown."""
        return None if self.sidecar is None else self.sidecar.step


def examine(
    path: Path, depth: Depth = Depth.HEADER, watch: Callable[[int], object] | None = None
) -> Status:
    """Examine a file; nothing in it is executed, and nothing is renamed.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder; its sidecar is expected beside it.
        depth: what to read of it.
        watch: called with numbers of bytes while all of them are read.
    """
    return look_into(path, depth, watch)[0]


def look_into(
    path: Path, depth: Depth = Depth.STRUCTURE, watch: Callable[[int], object] | None = None
) -> tuple[Status, Any]:
    """Examine a file, and return its content as far as it can be shown.

    Args:
        path: as in :func:`examine`.
        depth: as in :func:`examine`.
        watch: as in :func:`examine`.

    Returns:
        The status, and the tree of the file from
        :func:`helios.storage.codec.read_structure`; ``None`` if it was not or cannot be read.
    """
    file = checks_of(path, watch=watch)
    faults = _find_faults(file, depth)
    if faults and file_names.is_gone(path):
        # A file that was deleted while it is read may look damaged in any way.
        faults = [(Condition.UNREADABLE, gone_text(path))]
    condition, reason = faults[0] if faults else (Condition.GOOD, "")
    status = Status(
        path,
        condition,
        reason=reason,
        size=file.size,
        place=file_names.parse(path),
        sidecar=file.sidecar,
        checked=file.checked,
    )
    return status, file.tree


def _find_faults(file: FileChecks, depth: Depth) -> list[tuple[Condition, str]]:
    """Run the checks up to the first fault, and what can be shown of the file in any case."""
    faults: list[tuple[Condition, str]] = []

    def attempt(check: Callable[[], None], condition: Condition) -> None:
        try:
            check()
        except CheckpointError as error:
            faults.append((_condition_of(error, condition), str(error)))
        except (OSError, MemoryError, RecursionError) as error:
            what = str(error) or type(error).__name__
            faults.append((Condition.UNREADABLE, f"{file.path} could not be read: {what}."))

    def attempt_all(*checks: Check) -> None:
        for check in checks:
            if not faults:
                attempt(*check)

    attempt(file.read_sidecar, Condition.NEWER)
    attempt(file.find_files, Condition.FOREIGN)
    attempt_all((file.check_header, Condition.FOREIGN))
    if depth is Depth.BYTES:
        attempt_all((file.compare_bytes, Condition.UNMIGRATED))
    # Without a sidecar, only the content says what a file is.
    if depth > Depth.HEADER or (file.sidecar is None and not faults):
        attempt(file.read_structure, Condition.FOREIGN)
        attempt_all(*file.of_content())
    return faults


def _condition_of(error: CheckpointError, when_incompatible: Condition) -> Condition:
    """Return what a file is in which a check has found a fault."""
    if isinstance(error, DamagedCheckpointError):
        return Condition.DAMAGED
    is_incompatible = isinstance(error, IncompatibleCheckpointError)
    # Intact bytes that look damaged here.
    if not is_incompatible or isinstance(error.__cause__, DamagedCheckpointError):
        return Condition.UNREADABLE
    return when_incompatible


class StartOutcome(Enum):
    """The effect of a start of ``fit`` on a folder."""

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


def examine_folder(folder: Path, look: Callable[[Path], Status] = examine) -> FolderStatus:
    """Examine the checkpoints directly in a folder.

    Args:
        folder: the folder of one run.
        look: examines a file. What a start would do is determined as far as it looks.

    Raises:
        CheckpointError: if a running training deletes the checkpoints faster than they can be read.
    """
    files = _examine_all(folder, look)
    aside = [
        Status(
            path,
            Condition.ASIDE,
            f"{path} was found damaged at an earlier start.",
            place=file_names.parse(path),
        )
        for path in sorted(filter(file_names.is_damaged_checkpoint, folder.iterdir()))
    ]
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


def _find_start(files: list[Status], *, has_damaged: bool) -> tuple[Path | None, StartOutcome]:
    for status in reversed(files):
        if status.is_good:
            return status.path, StartOutcome.RESUMES
        if status.condition is not Condition.DAMAGED:
            return status.path, StartOutcome.REFUSES
    # A silent fresh start with only damaged checkpoints would hide the loss of the run.
    return None, StartOutcome.REFUSES if files or has_damaged else StartOutcome.FRESH


def survey(
    root: Path, look: Callable[[Path], Status] = examine, *, with_file: str | None = None
) -> Iterator[FolderStatus]:
    """Examine a folder and all folders below it, and yield those that hold checkpoints.

    Folders below it that ``resume="never"`` or a migration has moved aside are left out.

    Args:
        root: the folder of a run, or ``chkpt_root``.
        look: as in :func:`examine_folder`.
        with_file: folders with a file of this name are yielded too; ``None`` for none.

    Raises:
        CheckpointError: if a folder cannot be listed, and as in :func:`examine_folder`.
    """

    def refuse(error: OSError) -> None:
        raise CheckpointError(
            f"The folder {error.filename} cannot be listed: {error.strerror}. Check its "
            "permissions."
        ) from error

    for name, below, names in os.walk(root, onerror=refuse):
        folder = Path(name)
        present = [folder / part for part in (*names, *below)]
        below[:] = sorted(
            part
            for part in below
            if not part.startswith("before-") and not file_names.is_folder(Path(part))
        )
        if with_file in names or any(map(_is_shown, present)):
            yield examine_folder(folder, look)


def _is_shown(path: Path) -> bool:
    is_named_so = file_names.is_checkpoint(path) or file_names.is_damaged_checkpoint(path)
    return is_named_so and file_names.is_present(path)

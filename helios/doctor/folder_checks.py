"""Tries in a folder what a run does there: durable files, renaming, locking."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from helios.core.text import size_text
from helios.doctor.diagnosis import Diagnosis, Severity
from helios.storage import files

_FREE_BYTES = 1 << 30
_MOST_SKEW_SECONDS = 5.0
_LOCKED = 3
_TRY_LOCK = f"""
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit({_LOCKED})
"""
# What is gone when the machine or the container ends, and what ends it.
_FLEETING = {
    "tmpfs": "memory: a restart of the machine",
    "ramfs": "memory: a restart of the machine",
    "overlay": "the container: removing it",
}


@dataclass
class FolderExamination:
    """What was found in a folder.

    Attributes:
        facts: the folder, its file system and its free space, as plain values.
        findings: what is to be said of it.
    """

    facts: dict[str, Any]
    findings: list[Diagnosis] = field(default_factory=list)


def examine_run_folder(folder: Path, now: datetime) -> FolderExamination:
    """Try in a folder, or in the nearest one that exists, what a run does there.

    Everything happens in a new folder inside it, which is removed.

    Args:
        folder: the folder of a run, or ``chkpt_root``.
        now: the time of the system's clock.
    """
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    kind = _find_file_system(place)
    free = shutil.disk_usage(place).free
    found = FolderExamination({"path": str(folder), "file_system": kind, "free": free})
    found.findings += [*_check_kind(place, kind), *_check_space(place, free)]
    try:
        with tempfile.TemporaryDirectory(prefix=".helios-doctor-", dir=place) as scratch:
            found.findings += _try_files(Path(scratch), place, now)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        found.findings.append(
            _folder(
                Severity.WRONG if is_full else Severity.UNUSABLE,
                f"Files in {place} cannot be written, synced and renamed: {error.strerror}.",
                "Make room." if is_full else "Check the permissions, or use another chkpt_root.",
            )
        )
    return found


def _find_file_system(place: Path) -> str:
    """Return the type of the file system that a folder is on; empty if unknown."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return ""
    path, kind = place.resolve(), ""
    longest = -1
    for _, mount, name, *_ in lines:
        point = Path(mount.replace("\\040", " "))
        # Of two mounts at one place, the later one hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, kind = len(point.parts), name
    return kind


def _check_kind(place: Path, kind: str) -> Iterator[Diagnosis]:
    if kind in _FLEETING:
        what, _, end = _FLEETING[kind].partition(": ")
        yield _folder(
            Severity.NOTE,
            f"{place} is in {what} ({kind}): {end} deletes the checkpoints.",
            "Use a disk or a volume for chkpt_root if a run is to outlive that.",
        )


def _check_space(place: Path, free: int) -> Iterator[Diagnosis]:
    if free < _FREE_BYTES:
        yield _folder(
            Severity.WRONG,
            f"{place} has only {size_text(free)} free.",
            "Make room, or use another chkpt_root. A run warns if its checkpoints will not fit.",
        )


def _try_files(scratch: Path, place: Path, now: datetime) -> Iterator[Diagnosis]:
    for content in (b"old", b"new"):
        partial = scratch / "partial"
        with files.create(partial) as handle:
            files.write(handle, content)
            files.fsync(handle)
        files.replace(partial, scratch / "file")
        files.fsync_folder(scratch)
    if (scratch / "file").read_bytes() != b"new":
        yield _folder(
            Severity.UNUSABLE,
            f"In {place}, renaming a file does not replace the old one.",
            "Use another chkpt_root: checkpoints would not be complete after a kill.",
        )
    skew = (scratch / "file").stat().st_mtime - now.timestamp()
    if abs(skew) > _MOST_SKEW_SECONDS:
        yield Diagnosis(
            "clock",
            Severity.WRONG,
            f"The clock of the file system of {place} differs by {skew:.0f} s from this machine's.",
            "Synchronize both with a time server. Helios orders nothing by time, but times in "
            "logs and lineages will mislead you.",
        )
    yield from _try_lock(scratch / "file", place)


def _try_lock(path: Path, place: Path) -> Iterator[Diagnosis]:
    """Lock a file here, and try to lock it in another process, which must fail."""
    advice = "Never start a second run in the folder of one that is running."
    if sys.platform == "win32":
        yield _folder(Severity.NOTE, "Windows does not lock the folder of a run.", advice)
        return
    import fcntl

    with path.open("r+b") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, os.fspath(path)]
            works = subprocess.run(other, check=False).returncode == _LOCKED
        except OSError:
            works = False
    if not works:
        yield _folder(
            Severity.WRONG,
            f"The file system of {place} does not lock files, so a second run in the same folder "
            "is not refused.",
            f"Mount it with locks (NFS: without nolock), or use another chkpt_root. {advice}",
        )


def _folder(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("folder", severity, text, remedy)

"""What is tried in the folder of a run."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from helios.reports import doctor
from helios.reports.doctor import Diagnosis, examine_run_folder
from helios.storage import files


def examine(folder: Path, **late: float) -> list[Diagnosis]:
    """Return what is wrong; notes are left out, since any machine may have some."""
    now = datetime.now(timezone.utc) - timedelta(**late)
    _, found = examine_run_folder(folder, now)
    return [each for each in found if each.severity.exit_code]


def fail(code: int) -> Callable[..., None]:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.shows("P76")
def test_a_good_folder_has_nothing_wrong_and_stays_as_it_was(tmp_path: Path) -> None:
    assert examine(tmp_path / "runs" / "new") == []
    assert list(tmp_path.iterdir()) == []
    facts, _ = examine_run_folder(tmp_path, datetime.now(timezone.utc))
    assert facts["path"] == str(tmp_path)
    assert facts["free"] > 0


def test_the_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = f"/dev/a / overlay rw 0 0\nfs {tmp_path} tmpfs rw 0 0\nb {tmp_path}x nfs4 rw 0 0\n"
    (tmp_path / "mounts").write_text(mounts)
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args: read(tmp_path / "mounts" if path.name == "mounts" else path, *args),
    )
    facts, found = examine_run_folder(tmp_path, datetime.now(timezone.utc))
    assert facts["file_system"] == "tmpfs"
    assert [each.severity.value for each in found] == ["note"]
    assert "memory" in found[0].text


@pytest.mark.shows("P76")
@pytest.mark.parametrize("operation", ["fsync", "replace", "fsync_folder", "create"])
def test_what_a_save_needs_must_work(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, operation, fail(errno.EIO))
    [found] = examine(tmp_path)
    assert found.severity.value == "unusable"
    assert os.strerror(errno.EIO) in found.text


def test_a_full_disk_is_wrong_but_not_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write", fail(errno.ENOSPC))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert [each.severity.value for each in examine(tmp_path)] == ["wrong", "wrong"]


@pytest.mark.shows("P76")
def test_renaming_must_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(source: Path, target: Path) -> None:
        if not target.exists():
            source.replace(target)

    monkeypatch.setattr(files, "replace", keep)
    [found] = examine(tmp_path)
    assert "does not replace" in found.text


@pytest.mark.shows("P76")
def test_a_clock_that_differs_from_that_of_the_disk_is_wrong(tmp_path: Path) -> None:
    [found] = examine(tmp_path, hours=1)
    assert (found.topic, "3600 s" in found.text) == ("clock", True)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no record locks")
def test_locks_must_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "lockf", lambda *args: None)
    [found] = examine(tmp_path)
    assert "does not lock" in found.text
    monkeypatch.setattr(fcntl, "lockf", fail(errno.ENOLCK))
    monkeypatch.setattr(subprocess, "run", fail(errno.ENOENT))
    assert "does not lock" in examine(tmp_path)[0].text
    assert doctor._TRY_LOCK.count("LOCK_NB") == 1, "the other process must not wait"

"""One run in a folder: what holds the lock, what loses it, and who is told."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from helios.storage.folder_lock import LOCK_NAME, FolderLock
from tests.support.paused import locked


def is_free(folder: Path) -> bool:
    """Return whether another process can lock a folder."""
    try:
        with locked(folder):
            return True
    except EOFError:
        return False


@pytest.mark.parametrize("loss", ["its folder is deleted", "its file is copied"])
def test_a_lock_that_is_lost_is_acquired_again(loss: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    lock.acquire()
    if loss == "its folder is deleted":
        shutil.rmtree(folder)
    else:
        (folder / LOCK_NAME).read_bytes()
    assert is_free(folder)
    lock.acquire()
    assert not is_free(folder)
    lock.release()
    assert is_free(folder)


@pytest.mark.shows("S16")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_warned_of_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        lock = FolderLock(tmp_path)
        lock.acquire()
        assert lock.owner == ""
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path) in record.message
    assert os.strerror(number) in record.message

"""One run in a folder: what holds the lock, what loses it, and who is told."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios.errors import FolderInUseError
from helios.storage import folder_lock as lock_module
from helios.storage.folder_lock import LOCK_NAME, FolderLock
from tests.support.paused import another_process

_FORK = multiprocessing.get_context("fork")


def try_in_another_process(folder: Path) -> str:
    """Try to take a folder's lock in a process of its own; returns the error's text, or nothing."""
    receiver, sender = _FORK.Pipe(duplex=False)

    def work() -> None:
        lock = FolderLock(folder)
        try:
            lock.acquire()
            sender.send("")
            lock.release()
        except FolderInUseError as error:
            sender.send(str(error))

    child = _FORK.Process(target=work)
    child.start()
    text: str = receiver.recv()
    child.join()
    child.close()
    return text


def hold(folder: Path) -> Callable[[Callable[[], Any]], None]:
    def work(pause: Callable[[], Any]) -> None:
        with FolderLock(folder):
            pause()

    return work


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with another_process(hold(tmp_path)) as pid:
        with pytest.raises(FolderInUseError) as caught:
            FolderLock(tmp_path).acquire()
        text = str(caught.value)
        assert str(tmp_path) in text
        assert f"process {pid} on {socket.gethostname()}" in text
        assert json.loads((tmp_path / LOCK_NAME).read_text())["since"] in text
    assert try_in_another_process(tmp_path) == ""


def test_a_failed_try_takes_nothing_from_the_holder(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        for _ in range(2):
            assert f"process {os.getpid()}" in try_in_another_process(tmp_path)


def test_a_released_lock_leaves_nothing_behind_and_can_be_taken_again(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run")
    for _ in range(2):
        lock.acquire()
        lock.acquire()
        assert lock.is_held
        lock.release()
        lock.release()
        assert not lock.is_held
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_a_second_training_in_the_same_process_is_refused_and_takes_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with FolderLock(tmp_path / "run"):
        for path in (tmp_path / "run", tmp_path / "link"):
            with pytest.raises(FolderInUseError, match="in this process"):
                FolderLock(path).acquire()
        assert try_in_another_process(tmp_path / "run")
        with FolderLock(tmp_path / "other") as other:
            assert other.is_held
    with FolderLock(tmp_path / "run") as later:
        assert later.is_held


def test_of_many_threads_one_gets_the_folder(tmp_path: Path) -> None:
    locks = [FolderLock(tmp_path) for _ in range(8)]
    barrier = threading.Barrier(len(locks))

    def work(lock: FolderLock) -> None:
        barrier.wait()
        with contextlib.suppress(FolderInUseError):
            lock.acquire()

    threads = [threading.Thread(target=work, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = [lock for lock in locks if lock.is_held]
    assert try_in_another_process(tmp_path)
    holder.release()


def test_a_kill_frees_the_folder_while_children_live_on(tmp_path: Path) -> None:
    is_alive, lives = os.pipe()
    may_end, end = os.pipe()

    def work(pause: Callable[[], Any]) -> None:
        FolderLock(tmp_path).acquire()
        if os.fork() == 0:
            os.close(end)
            os.write(lives, b"x")
            os.read(may_end, 1)
            os._exit(0)
        pause()

    with another_process(work) as pid:
        os.close(lives)
        assert os.read(is_alive, 1) == b"x"
        assert try_in_another_process(tmp_path)
        os.kill(pid, signal.SIGKILL)
        # Not a matter of time: a process is gone, locks and all, before its parent is told.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with FolderLock(tmp_path) as lock:
            assert lock.is_held
            os.close(end)
            assert os.read(is_alive, 1) == b"", "the grandchild lived until here"
    os.close(is_alive)
    os.close(may_end)


def test_a_forked_child_neither_holds_the_lock_nor_takes_it_away(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    with another_process(lambda pause: pause()):
        lock.release()
        assert try_in_another_process(tmp_path) == ""
        lock.acquire()
    # The child has ended, and its copies of the descriptors are closed.
    assert try_in_another_process(tmp_path)
    lock.release()


def test_a_forked_child_that_unwinds_leaves_the_lock_of_its_parent(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        child = _FORK.Process(target=lock.release)
        child.start()
        child.join()
        assert child.exitcode == 0
        child.close()
        assert lock.path.exists()
        assert try_in_another_process(tmp_path)


def test_what_another_process_sees_of_a_folder_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_PATIENCE", 0.0)
    (tmp_path / "run").mkdir()
    other = FolderLock(tmp_path / "run")
    assert other.token == ""
    assert other.is_shown("")
    assert not FolderLock(tmp_path / "nowhere").is_shown("")
    with FolderLock(tmp_path / "run") as lock:
        assert str(os.getpid()) in lock.token
        token = lock.token
        with monkeypatch.context() as patch:
            # A look from here would give up the lock, as closing the file does.
            patch.setattr(Path, "read_text", lambda path: token)
            assert other.is_shown(token)
            assert not other.is_shown(token + " of another")
    assert not other.is_shown(token), "the file of the lock is gone"


def test_a_folder_that_is_shown_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(tmp_path / "run")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (tmp_path / "run").mkdir()

    monkeypatch.setattr(lock_module.time, "sleep", pause)
    assert lock.is_shown("")
    assert len(pauses) == 3


def test_a_child_that_trains_itself_does_not_mistake_the_lock_for_its_own(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} on " in try_in_another_process(tmp_path)


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda path: (path / LOCK_NAME).unlink()])
def test_what_was_deleted_is_locked_again(tmp_path: Path, gone: Callable[[Path], Any]) -> None:
    folder = tmp_path / "run"
    with FolderLock(folder) as lock:
        gone(folder)
        assert try_in_another_process(folder) == ""
        lock.renew()
        assert f"process {os.getpid()}" in try_in_another_process(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_lock_that_was_closed_away_is_taken_again(tmp_path: Path, is_renewed: bool) -> None:
    """Whoever copies the folder in this process closes the lock's file, and the lock is gone."""
    with FolderLock(tmp_path) as lock:
        shutil.copy(tmp_path / LOCK_NAME, tmp_path / "copy")
        if is_renewed:
            lock.renew()
        assert bool(try_in_another_process(tmp_path)) == is_renewed


def test_a_folder_that_another_run_has_taken_since_is_not_taken_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    lock.acquire()
    shutil.rmtree(folder)
    with another_process(hold(folder)) as pid:
        with pytest.raises(FolderInUseError, match=f"process {pid} "):
            lock.renew()
        lock.release()
        assert try_in_another_process(folder), "its file was not removed"


def test_renewing_what_is_held_changes_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        before = (tmp_path / LOCK_NAME).stat()
        lock.renew()
        assert (tmp_path / LOCK_NAME).stat() == before
        assert try_in_another_process(tmp_path)


def test_a_file_that_its_owner_removed_in_the_meantime_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would hold a lock: one of the old file, one of the new."""
    path, opened = tmp_path / LOCK_NAME, []
    path.touch()

    def open_late(name: Path, *args: Any) -> int:
        descriptor = os.open(name, *args)
        if not opened:
            path.unlink()
        opened.append(descriptor)
        return descriptor

    monkeypatch.setattr(lock_module, "os", _Patched(os, open=open_late))
    with FolderLock(tmp_path):
        assert len(opened) == 2
        assert try_in_another_process(tmp_path)


class _Patched:
    """A module, with some functions in the place of its own."""

    def __init__(self, module: Any, **functions: Any) -> None:
        vars(self).update(vars(module) | functions)


@pytest.mark.shows("S16")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_warned_of_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        with FolderLock(tmp_path) as lock:
            assert not lock.is_held
            lock.renew()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path) in record.message
    assert os.strerror(number) in record.message
    with FolderLock(tmp_path) as lock:
        assert lock.is_held


def test_a_system_without_such_locks_is_warned_of_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_module.sys, "platform", "win32")
    with FolderLock(tmp_path) as lock:
        assert not lock.is_held
    assert "could not be locked" in caplog.text


def test_a_folder_that_cannot_be_made_is_warned_of_and_tried_again_at_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "root").touch()
    with FolderLock(tmp_path / "root" / "run") as lock:
        lock.renew()
        assert len(caplog.records) == 1
        (tmp_path / "root").unlink()
        lock.renew()
        assert lock.is_held
        assert try_in_another_process(tmp_path / "root" / "run")


def test_a_full_disk_takes_the_words_and_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock_module, "os", _Patched(os, pwrite=refuse))
    with FolderLock(tmp_path):
        assert "in use by another run: another process has locked it" in try_in_another_process(
            tmp_path
        )


def test_who_only_loads_makes_no_folder_and_locks_the_one_that_is_there(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run", makes_folder=False) as lock:
        assert not lock.is_held
        assert not (tmp_path / "run").exists()
    with FolderLock(tmp_path, makes_folder=False):
        assert try_in_another_process(tmp_path)

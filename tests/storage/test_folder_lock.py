"""One run in a folder: what holds the lock, what loses it, and who is told."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios.errors import FolderInUseError
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


@pytest.mark.shows("S16")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
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

"""Two runs in one folder: the second is told so, and a killed first one keeps nobody out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import FolderInUseError
from helios.state import TrainingState
from helios.storage.folder_lock import LOCK_NAME
from tests.support.paused import another_process
from tests.support.quiet import Quiet
from tests.support.resume import assert_equal
from tests.support.runs import Setting, train

# What lies in the folder at a moment must not depend on a thread.
_SYNC: dict[str, Any] = {"store": helios.CheckpointStore(is_async=False)}
_SETTING = Setting(
    total_steps=9, chkpt_frequency=2, num_workers=2, persistent_workers=True, options=_SYNC
)


class PauseAt(Quiet):
    unsaved = ("pause", "iteration")

    def __init__(self, iteration: int, pause: Callable[[], None]) -> None:
        super().__init__("pause-at")
        self.iteration, self.pause = iteration, pause

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            self.pause()


def first_run(work: Any, iteration: int = 5) -> contextlib.AbstractContextManager[int]:
    """Call ``work(plugin)`` in a child; yields its process's number while it pauses."""
    return another_process(lambda pause: work(PauseAt(iteration, pause)))


def find_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.shows("S16")
def test_a_second_fit_says_who_uses_the_folder_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with first_run(lambda plugin: train(folder, _SETTING, plugin)) as pid:
        before = sorted(path.name for path in folder.rglob("*"))
        for options in ({}, {"resume": "never"}):
            with pytest.raises(FolderInUseError) as caught:
                train(folder, dataclasses.replace(_SETTING, options=_SYNC | options))
            assert str(folder / "small") in str(caught.value)
            assert f"process {pid} on {socket.gethostname()}" in str(caught.value)
        assert sorted(path.name for path in folder.rglob("*")) == before
    assert helios.find_last_checkpoint(folder / "small") == (
        folder / "small" / "small_epoch_2_iter_9.pth"
    ), "the first one went on"
    assert not (folder / "small" / LOCK_NAME).exists()


@pytest.mark.shows("S16")
def test_a_kill_frees_the_folder_while_the_workers_live_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _SETTING)
    folder = tmp_path / "run"
    with first_run(lambda plugin: train(folder, _SETTING, plugin)) as pid:
        workers = find_children(pid)
        assert len(workers) == 2
        for worker in workers:
            # They end by themselves when they see that their parent is gone: not yet.
            os.kill(worker, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert (folder / "small" / LOCK_NAME).exists()
            resumed = train(folder, _SETTING)
            for worker in workers:
                os.kill(worker, 0)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
    assert_equal(resumed, whole, since=4)

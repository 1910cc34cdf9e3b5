"""The process that sends ends with the training, whoever has inherited its pipes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from helios.errors import FolderInUseError
from helios.storage.folder_lock import FolderLock
from helios.tracking.point_store import PointStore
from helios.tracking.sender_process import SenderProcess, start_sender
from helios.tracking.targets import MLflow, to_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from tests.support.kills import kill_self, run_in_child

pytestmark = pytest.mark.usefixtures("stand_in_libraries")
_STEP, _SECONDS = 0.05, 60.0


def wait_for(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(round(_SECONDS / _STEP)):
        if is_so():
            return
        pause.wait(_STEP)
    raise AssertionError("it never was so")


def is_free(folder: Path) -> bool:
    """Whether no sender has the folder."""
    try:
        with FolderLock(folder):
            return True
    except FolderInUseError:
        return False


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


ENDS: dict[str, tuple[int, Callable[[SenderProcess], object]]] = {
    "killed": (-9, lambda sender: kill_self()),
    "finished": (0, lambda sender: sender.finish("finished", _SECONDS)),
    "stopped": (0, lambda sender: sender.stop()),
}


@pytest.mark.shows("P67")
@pytest.mark.parametrize("end", ENDS)
def test_a_loader_worker_that_lives_on_keeps_nobody_waiting(
    end: str, tmp_path: Path, uri: str
) -> None:
    folder = TrackerFolder(tmp_path / "tracker")
    store = PointStore(
        folder, TrackedRun("", "small", to_plain(MLflow(uri)), {}, created=1), forks=True
    )
    store.open(None)
    store.add({"time": 1, "epoch": 1, "iteration": 1, "values": {"loss": 1.0}})
    store.close("killed")
    code, act = ENDS[end]

    def train() -> None:
        sender = start_sender(folder)
        assert sender is not None
        wait_for((folder.path / "sent.json").exists)
        worker = os.fork()
        if worker == 0:
            # It has the ends of the pipes that the training has, and closes none.
            while True:
                signal.pause()
        (tmp_path / "worker").write_text(str(worker))
        act(sender)

    assert run_in_child(train, tmp_path / "outcome") == code
    worker = int((tmp_path / "worker").read_text())
    assert not is_gone(worker)
    try:
        wait_for(lambda: is_free(folder.path))
    finally:
        os.kill(worker, signal.SIGKILL)

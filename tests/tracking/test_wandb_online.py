"""Online runs of the real client of W&B, killed at random, as the server shows them.

W&B's own servers were not reached. The server here is a stand-in, written from what the client
asks; ``tests/support/wandb_server.py`` says what it assumes of the real one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from helios.errors import FolderInUseError
from helios.plugins import WandB
from helios.storage.folder_lock import InheritedLock
from helios.tracking.tracker_folder import TrackerFolder
from tests.support import tracked
from tests.support.tracked_training import end_tracked, free_port, start_tracked

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        find_spec("wandb") is None, reason="needs W&B: pip install helios-trainer[wandb]"
    ),
]
_ROOT = Path(__file__).parent.parent.parent
_TARGET = WandB("p", run_name="mine", mode="online")
_KEY = "0123456789" * 4
_KILLS, _STEPS, _SECONDS = 20, 1400, 120.0


class Server:
    """The stand-in for W&B's server, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.wandb_server"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.folder), str(self.port)], cwd=_ROOT, stdout=log, stderr=log
            )
        wait_for(self._answers)

    def _answers(self) -> bool:
        with suppress(OSError):
            address = f"http://127.0.0.1:{self.port}/ready"
            urllib.request.urlopen(urllib.request.Request(address, b""), timeout=5).close()
            return True
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def read(self, folder: Path) -> dict[str, Any]:
        """Return the run of a tracker, and nothing before it has come."""
        path, run = self.folder / "runs.json", TrackerFolder(folder / "tracker").read_run()
        runs = json.loads(path.read_text()) if path.exists() and run is not None else {}
        return runs.get(run.key, {}) if run is not None else {}

    def steps(self, folder: Path) -> list[int]:
        return [json.loads(line)["_step"] for line in self.read(folder).get("history", ())]


def wait_for(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end, "it never was so"
        threading.Event().wait(0.02)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Server(tmp_path / "server")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{found.port}")
    monkeypatch.setenv("WANDB_API_KEY", _KEY)
    # W&B's servers are spared by a pause of 15 seconds.
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "0.2")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield found
    found.stop()


def find_children(pid: int | None) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def find_senders(training: BaseProcess) -> list[int]:
    """Return the process that sends, and that of the library."""
    senders = find_children(training.pid)
    return senders + [child for sender in senders for child in find_children(sender)]


def _kill(server: Server, folder: Path, kind: str, draws: random.Random) -> None:
    """Start the training, wait until some iterations have arrived, and kill processes of it."""
    before = len(server.steps(folder))
    points = folder / "tracker" / "points.jsonl"
    training = start_tracked(folder, _TARGET, _STEPS, 0.25)
    if kind == "server":
        server.stop()
        size = points.stat().st_size + draws.randrange(1, 1500)
        wait_for(lambda: points.stat().st_size > size)
    else:
        wanted = before + draws.randrange(1, 12)
        wait_for(lambda: len(server.steps(folder)) >= wanted or not training.is_alive())
    assert training.is_alive(), "The training came to its end before it was killed."
    senders = find_senders(training)
    if kind == "sender":
        kill_all(senders[:1])
        size = points.stat().st_size + draws.randrange(1, 1000)
        wait_for(lambda: points.stat().st_size > size)
    training.kill()
    if kind == "all":
        kill_all(senders)
    assert end_tracked(training) == -9
    if kind == "server":
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in senders))
        server.start()


def _clean(history: list[str]) -> list[dict[str, Any]]:
    """Return lines without what depends on the clock."""
    rows = [json.loads(line) for line in history]
    for row in rows:
        del row["_timestamp"], row["_runtime"]
    return rows


def test_a_server_shows_the_undisturbed_run_after_many_kills(
    tmp_path: Path, server: Server
) -> None:
    """Of the training, of the process that sends, of both and the library's, and of the server."""
    whole, killed, draws = tmp_path / "whole", tmp_path / "killed", random.Random(5)
    server.start()
    assert end_tracked(start_tracked(whole, _TARGET, _STEPS, 0.0)) == 0
    kinds = ["training", "sender", "all", "server"] * (_KILLS // 4)
    for kind in kinds:
        _kill(server, killed, kind, draws)
    assert end_tracked(start_tracked(killed, _TARGET, _STEPS, 0.0)) == 0
    runs = [server.read(folder) for folder in (whole, killed)]
    histories = [_clean(run["history"]) for run in runs]
    assert [row["_step"] for row in histories[1]] == [*range(1, _STEPS + 1)]
    assert histories[0] == histories[1]
    stored = tracked.stored_curves(killed / "tracker")
    assert tracked.history_curves(histories[1]) == tracked.without_times(stored)
    times = {row["iteration"]: row["time"] for row in _rows(killed)}
    for line in runs[1]["history"]:
        row = json.loads(line)
        assert round(row["_timestamp"] * 1000) == times[row["_step"]]
    assert [run["state"] for run in runs] == ["finished"] * 2
    _check_rest(server, *runs, folder=killed)


def _rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "tracker" / "points.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _check_rest(
    server: Server, whole: dict[str, Any], killed: dict[str, Any], folder: Path
) -> None:
    configs = [json.loads(run["config"]) for run in (whole, killed)]
    for config in configs:
        del config["_wandb"]
    assert configs[0] == configs[1] | {"options.chkpt_root": configs[0]["options.chkpt_root"]}
    summaries = [json.loads(run["summary"]) for run in (whole, killed)]
    for summary in summaries:
        for name in ("_timestamp", "_runtime", "_wandb"):
            del summary[name]
    assert summaries[0] == summaries[1]
    assert summaries[1]["outcome"] == "finished"
    pictures = [json.loads(line)["shade"]["path"] for line in killed["history"] if "shade" in line]
    assert len(pictures) == _STEPS // 10
    run = TrackerFolder(folder / "tracker").read_run()
    assert run is not None
    sent = {(server.folder / run.key / path).read_bytes() for path in pictures}
    assert sent == {path.read_bytes() for path in (folder / "tracker" / "pictures").iterdir()}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(_KEY.encode() in path.read_bytes() for path in files)
    assert list((folder / "tracker" / "wandb").glob("run-*")) == []


def test_the_library_is_waited_for_after_a_kill(tmp_path: Path, server: Server) -> None:
    """Its process inherits the lock of the sender, and ends with it, unless it is stopped."""
    server.start()
    training = start_tracked(tmp_path / "run", _TARGET, _STEPS, 0.25)
    wait_for(lambda: server.steps(tmp_path / "run"))
    sender, library = find_senders(training)
    os.kill(library, signal.SIGSTOP)
    training.kill()
    assert end_tracked(training) == -9
    wait_for(lambda: not Path(f"/proc/{sender}").exists())
    lock = InheritedLock(tmp_path / "run" / "tracker" / ".helios-wandb-lock")
    with pytest.raises(FolderInUseError):
        lock.acquire()
    os.kill(library, signal.SIGCONT)
    wait_for(lambda: _is_acquired(lock))
    lock.release()


def _is_acquired(lock: InheritedLock) -> bool:
    with suppress(FolderInUseError):
        lock.acquire()
        return True
    return False

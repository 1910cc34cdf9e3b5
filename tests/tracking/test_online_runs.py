"""Online runs of W&B: whole iterations, from where the server says it stands.

The library and its server are a stand-in; ``test_wandb_online.py`` has the real client.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios import cli
from helios.errors import ArgumentError, FolderInUseError
from helios.plugins import Plugin, Tracker, WandB
from helios.storage.folder_lock import InheritedLock
from helios.tracking import wandb_run
from helios.tracking.point_store import PointStore, store_picture
from helios.tracking.sender_process import Sender, connect
from helios.tracking.targets import Delivery, Target, from_plain, to_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from tests.support.kills import KillAt, train_in_child
from tests.support.runs import Setting, train

pytestmark = pytest.mark.usefixtures("stand_in_libraries")
_ONLINE = WandB("p", entity="team", mode="online")


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the server."""
    path = tmp_path / "wandb-server.json"
    monkeypatch.setenv("WANDB_STAND_IN", str(path))
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    return path


def _row(number: int, name: str = "loss", *, time: int = 0) -> dict[str, Any]:
    return {"time": time, "epoch": 1, "iteration": number, "values": {name: number / 8}}


def _open(folder: Path, target: Target = _ONLINE, mark: Any = None) -> PointStore:
    run = TrackedRun("", "small", to_plain(target), {"lr": 0.1}, created=1)
    store = PointStore(TrackerFolder(folder), run, forks=mark is None)
    store.open(mark)
    return store


def _store(folder: Path, rows: list[dict[str, Any]], outcome: str = "killed") -> TrackerFolder:
    store = _open(folder)
    for row in rows:
        store.add(row)
    store.close(outcome)
    return store.folder


def _send(folder: TrackerFolder, *, is_finished: bool = False) -> Sender:
    run = folder.read_run()
    assert run is not None
    sender = Sender(folder, run, connect(folder, run))
    try:
        sender.flush(is_finished=is_finished)
    finally:
        # As if its process were killed.
        sender._destination._lock.release()
    return sender


def _runs(server: Path) -> list[dict[str, Any]]:
    return list(json.loads(server.read_text()).values())


def _history(server: Path) -> list[dict[str, Any]]:
    (run,) = _runs(server)
    return list(run["history"])


def _steps(server: Path) -> list[int]:
    return [line["_step"] for line in _history(server)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tracker"


@pytest.mark.shows("P116")
def test_an_iteration_is_one_line_and_is_sent_when_it_is_complete(
    folder: Path, server: Path
) -> None:
    rows = [_row(0, time=1500), _row(1), _row(1, "valid"), _row(2)]
    stored = _store(folder, rows)
    sender = _send(stored)
    assert _steps(server) == [0, 1]
    assert _history(server)[1] == {
        "_step": 1, "epoch": 1, "_timestamp": 0.0, "loss": 0.125, "valid": 0.125
    }  # fmt: skip
    assert _history(server)[0]["_timestamp"] == 1.5
    with stored.points.open("a") as handle:
        handle.write("".join(json.dumps(row) + "\n" for row in (_row(2, "valid"), _row(3))))
    sender.flush()
    assert _steps(server) == [0, 1, 2]
    assert {"loss", "valid"} <= _history(server)[2].keys()
    sender.flush(is_finished=True)
    assert _steps(server) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_an_iteration_is_whole_wherever_a_read_ends(
    size: int, folder: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helios.tracking.tracker_folder._READ_AT_ONCE", size)
    rows = [_row(number, name) for number in range(4) for name in "abcde"]
    _send(_store(folder, rows), is_finished=True)
    assert [sum(name in line for name in "abcde") for line in _history(server)] == [5] * 4


@pytest.mark.shows("P116")
@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("has", range(7))
def test_a_start_sends_what_the_server_lacks_whatever_was_noted(
    has: int, noted: bool, folder: Path, server: Path
) -> None:
    """The server may have less than was handed to the library, and more than was noted."""
    stored = _store(folder, [_row(number) for number in range(6)], "finished")
    _send(stored, is_finished=True)
    whole = _history(server)
    runs = json.loads(server.read_text())
    (key,) = runs
    runs[key]["history"] = whole[:has]
    server.write_text(json.dumps(runs))
    if not noted:
        (folder / "sent.json").unlink()
    sender = _send(stored, is_finished=True)
    assert sender.num_sent == 6 - min(has, 6)
    assert _history(server) == whole


@pytest.mark.shows("P116")
def test_a_picture_that_did_not_arrive_with_its_line_is_sent_by_the_next_start(
    folder: Path, server: Path
) -> None:
    store = _open(folder)
    for number in range(4):
        file = store_picture(store.folder.pictures, np.full((2, 2, 1), number, np.uint8))
        store.add(_row(number))
        store.add({"time": 1, "epoch": 1, "iteration": number, "picture": "a/p", "file": file})
    store.close("finished")
    _send(store.folder, is_finished=True)
    (run,) = _runs(server)
    names = [line["a/p"]["path"] for line in run["history"]]
    assert run["files"] == names
    runs = {key: {**each, "files": names[:1] + names[2:]} for key, each in
            json.loads(server.read_text()).items()}  # fmt: skip
    server.write_text(json.dumps(runs))
    _send(store.folder, is_finished=True)
    (run,) = _runs(server)
    assert sorted(run["files"]) == sorted(names)
    assert [line["_step"] for line in run["history"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("outcome", "state", "code", "last"),
    [("finished", "finished", 0, 3), ("failed", "failed", 1, 2), ("killed", "failed", 255, 2)],
)
def test_helios_send_ends_the_run_as_training_has_ended(
    outcome: str, state: str, code: int, last: int, folder: Path, server: Path
) -> None:
    """The last iteration is held back unless the training is finished."""
    _store(folder, [_row(number) for number in range(4)], outcome)
    assert cli.main(["send", str(folder)]) == 0
    (run,) = _runs(server)
    assert (run["state"], run["exit_code"]) == (state, code)
    assert run["summary"]["outcome"] == outcome
    assert run["summary"]["loss.min"] == 0.0
    assert _steps(server)[-1] == last
    assert run["config"] == {"lr": 0.1}
    assert not list((folder / "wandb").glob("run-*"))


@pytest.mark.shows("P117")
def test_a_server_that_has_not_all_is_an_error_at_the_end(
    folder: Path, server: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    monkeypatch.setattr(wandb_run, "_PATIENCE", 0.0)
    monkeypatch.setattr(wandb_run, "_PAUSE", 0.0)
    _store(folder, [_row(number) for number in range(4)], "finished")
    with monkeypatch.context() as patch:
        patch.setattr(wandb.Api, "lastHistoryStep", 2)
        assert cli.main(["send", str(folder)]) == 1
    assert "has not received all up to iteration 3" in capsys.readouterr().err


@pytest.mark.shows("P117")
def test_a_server_that_is_down_is_a_warning_and_gets_all_later(
    tmp_path: Path, server: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = server.with_suffix(".down")
    down.touch()
    train(tmp_path, Setting(print_frequency=1), Tracker(tmp_path / "tracker", _ONLINE))
    found = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(found) == 2
    assert "the server is down. They are kept" in found[0]
    assert "helios send" in found[1]
    assert not server.exists()
    down.unlink()
    assert cli.main(["send", str(tmp_path / "tracker")]) == 0
    assert _steps(server) == [*range(1, 15)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"secret-key" in path.read_bytes() for path in files)


@pytest.mark.shows("P117")
def test_a_killed_training_goes_on_with_the_same_run(tmp_path: Path, server: Path) -> None:
    setting = Setting(print_frequency=1, chkpt_frequency=2)

    def tracker() -> Tracker:
        return Tracker(tmp_path / "tracker", _ONLINE)

    class Wait(Plugin):
        """Waits until iterations have arrived."""

        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: Any, should_log: bool) -> None:
            pause = threading.Event()
            while state.global_iteration == 7 and not (server.exists() and _history(server)):
                pause.wait(0.05)

    plugins = (tracker(), Wait("wait"), KillAt("on_training_batch_end", 8))
    assert train_in_child(tmp_path, setting, *plugins) == -9
    (run,) = _runs(server)
    assert run["state"] == "running"
    assert 0 < len(run["history"]) < 8
    train(tmp_path, setting, tracker())
    (run,) = _runs(server)
    assert run["state"] == "finished"
    assert _steps(server) == [*range(1, 15)]


def test_credentials_that_are_missing_are_an_error_with_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    _store(folder, [_row(1)])
    assert cli.main(["send", str(folder)]) == 2
    assert "Set WANDB_API_KEY, or run: wandb login" in capsys.readouterr().err


@pytest.mark.shows("P117")
def test_the_process_of_an_earlier_sender_is_waited_for(folder: Path, server: Path) -> None:
    stored = _store(folder, [_row(1), _row(2)])
    earlier = InheritedLock(folder / ".helios-wandb-lock")
    earlier.acquire()
    with pytest.raises(FolderInUseError, match="still running"):
        _send(stored)
    assert not server.exists()
    earlier.release()
    _send(stored)
    assert _steps(server) == [1]


@pytest.mark.shows("P116")
def test_what_is_added_to_an_iteration_that_was_sent_begins_a_new_run(
    folder: Path, server: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server cannot add to it: a finished training has sent its last iteration."""
    stored = _store(folder, [_row(1), _row(2)], "finished")
    _send(stored, is_finished=True)
    store = _open(folder, mark={"path": str(stored.points), **_mark(stored)})
    assert store.add(_row(2, "late"))
    store.close("finished")
    _send(stored, is_finished=True)
    first, second = _runs(server)
    assert "late" not in first["history"][-1]
    assert {"loss", "late"} <= second["history"][-1].keys()
    assert "another course" in caplog.text


def _mark(stored: TrackerFolder) -> dict[str, Any]:
    import hashlib

    data = stored.points.read_bytes()
    return {"size": len(data), "digest": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("modes", [("offline", "online"), ("online", "offline")])
def test_another_mode_is_another_target(modes: tuple[Any, Any], folder: Path) -> None:
    first = _open(folder, WandB("p", mode=modes[0]))
    first.add(_row(1))
    mark = first.mark()
    first.close("killed")
    second = _open(folder, WandB("p", mode=modes[1]), mark)
    assert second.run.key != first.run.key
    second.close("killed")


def test_a_folder_of_an_earlier_version_is_offline() -> None:
    plain = {"kind": "WandB", "project": "p", "entity": "", "run_name": "", "folder": ""}
    assert to_plain(WandB("p")) == plain
    assert from_plain(plain).delivery is Delivery.AT_ONCE
    assert from_plain(to_plain(_ONLINE)) == _ONLINE


@pytest.mark.parametrize("mode", ["Online", "", None, "disabled"])
def test_another_word_is_no_mode(mode: Any) -> None:
    make: Callable[..., WandB] = WandB
    with pytest.raises((ArgumentError, TypeError), match=r"WandB\(mode=...\) must be"):
        make("p", mode=mode)


def test_a_server_that_gets_nothing_is_noticed(
    folder: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_run, "_ASK_EVERY", 0.0)
    sender = _send(_store(folder, [_row(1), _row(2)]))
    server.with_suffix(".down").touch()
    with pytest.raises(ConnectionError):
        sender.flush()

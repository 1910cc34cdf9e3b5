"""The real libraries: what their servers and files show after many kills, read back.

MLflow's server runs here, with SQLite. Offline runs of W&B are read from their files; its servers
cannot be reached from a test.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios import cli
from helios.plugins import MLflow, WandB
from helios.tracking.mlflow_run import clean
from helios.tracking.point_store import PointStore, store_picture
from helios.tracking.sender_process import Sender, connect
from helios.tracking.targets import to_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from tests.support import tracked
from tests.support.tracked_training import (
    SECONDS,
    end_tracked,
    free_port,
    start_tracked,
    train_tracked,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]
needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None or find_spec("sqlalchemy") is None,
    reason="needs MLflow with its server: pip install mlflow",
)
needs_wandb = pytest.mark.skipif(
    find_spec("wandb") is None, reason="needs W&B: pip install helios-trainer[wandb]"
)
_KILLS = 20


@contextmanager
def serve(folder: Path, port: int) -> Iterator[str]:
    """Run a server of MLflow until the block ends."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers=1", f"--port={port}"]
    options = [
        f"--backend-store-uri=sqlite:///{folder}/base.db",
        f"--artifacts-destination={folder}",
    ]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [*command, *options], stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    try:
        yield _wait(f"http://127.0.0.1:{port}")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(uri: str) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
            return uri
        threading.Event().wait(0.2)
    raise TimeoutError(uri)


def _kill_at_random(
    folder: Path, target: Any, steps: int, draws: random.Random, *, sends: bool = False
) -> None:
    """Start the training, and kill it at some point after those that it has reached.

    Args:
        folder: that of the run.
        target: where the points go.
        steps: those of the whole training.
        draws: when.
        sends: whether to wait until this start has sent something.
    """
    path = folder / "tracker" / "points.jsonl"
    before, sent = _size(path), _read_sent(folder)
    wanted = before + draws.randrange(1, 2500)
    training = start_tracked(folder, target, steps, 0.5 if sends else 0.05)
    while training.is_alive() and (
        _size(path) < wanted or (sends and _read_sent(folder) <= max(sent, before))
    ):
        threading.Event().wait(0.01 * draws.random())
    training.kill()
    assert end_tracked(training) == -9, "The training came to its end before it was killed."


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_sent(folder: Path) -> int:
    run = TrackerFolder(folder / "tracker").read_run() if _size(folder / "tracker") else None
    if run is None:
        return 0
    return TrackerFolder(folder / "tracker").read_progress(run.key).sent.get("numbers", 0)


def _stored(folder: Path) -> dict[str, list[tuple[int, str]]]:
    return tracked.without_times(tracked.stored_curves(folder / "tracker"))


@needs_mlflow
def test_a_server_of_mlflow_shows_the_undisturbed_run_after_many_kills(tmp_path: Path) -> None:
    """At one kill the server is down; at half of the others, points of that start were sent."""
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 800
    train_tracked(whole, MLflow("http://127.0.0.1:1"), steps, 0.0, sends=False)
    draws, port = random.Random(3), free_port()
    target = MLflow(f"http://127.0.0.1:{port}", "kills")
    with serve(tmp_path, port):
        for number in range(_KILLS // 2):
            _kill_at_random(killed, target, steps, draws, sends=number % 2 == 0)
    _kill_at_random(killed, target, steps, draws)
    with serve(tmp_path, port) as uri:
        for number in range(_KILLS - _KILLS // 2 - 1):
            _kill_at_random(killed, target, steps, draws, sends=number % 2 == 0)
        assert end_tracked(start_tracked(killed, target, steps, 0.0)) == 0
        (run,) = tracked.find_runs(uri, "kills")
        stored = tracked.stored_curves(killed / "tracker")
        read = tracked.read_mlflow(uri, run.info.run_id, [*stored])
        assert read == stored
        assert tracked.without_times(read) == _stored(whole)
        assert [step for step, _, _ in read["train/loss"]] == [*range(1, steps + 1)]
        assert run.info.status == "FINISHED"
        assert run.data.params["options.total_steps"] == str(steps)
        _check_artifacts(uri, run.info.run_id, steps)


def _check_artifacts(uri: str, run_id: str, steps: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = {each.path for each in client.list_artifacts(run_id)}
    assert found == {"pictures", "summary.json"}
    folders = client.list_artifacts(run_id, "pictures/shade")
    assert [len(client.list_artifacts(run_id, each.path)) for each in folders] == [1] * (
        steps // 10
    )


@needs_wandb
def test_an_offline_run_of_wandb_is_the_undisturbed_one_after_many_kills(tmp_path: Path) -> None:
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 400
    train_tracked(whole, WandB("p"), steps, 0.0)
    draws = random.Random(4)
    for number in range(_KILLS):
        _kill_at_random(killed, WandB("p"), steps, draws)
        if number == _KILLS // 2:
            # What is written in between is replaced later.
            _check_in_child(f"_send(Path({str(killed / 'tracker')!r}))")
    assert end_tracked(start_tracked(killed, WandB("p"), steps, 0.0)) == 0
    curves = []
    for folder in (whole, killed):
        (run,) = (folder / "tracker" / "wandb").glob("offline-run-*")
        history = tracked.read_wandb(run)
        assert [row["_step"] for row in history] == sorted({row["_step"] for row in history})
        curves.append(tracked.history_curves(history))
        assert curves[-1] == _stored(folder)
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[1]["train/loss"]] == [*range(1, steps + 1)]


@pytest.mark.parametrize(
    "kind",
    ["stand-in", pytest.param("library", marks=needs_mlflow)],
)
def test_the_stand_in_of_mlflow_is_faithful(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same points, names and refusals, sent twice, give the same on both."""
    if kind == "library":
        with serve(tmp_path, free_port()) as uri:
            _check_in_child(f"_check_mlflow(Path({str(tmp_path)!r}), {uri!r})")
    else:
        with tracked.stand_ins(monkeypatch):
            _check_mlflow(tmp_path, f"sqlite:///{tmp_path}/base.db")


def _send(folder: Path) -> None:
    assert cli.main(["send", str(folder)]) == 0


def _check_in_child(call: str) -> None:
    """Check in a process of its own: the libraries start threads, and change its environment."""
    name = call.partition("(")[0]
    # W&B starts a process, and gives up after 30 seconds, which a busy machine may need.
    variables = os.environ | {"WANDB_X_SERVICE_WAIT": "600"}
    program = f"from pathlib import Path; from tests.tracking.test_libraries import {name}; {call}"
    subprocess.run([sys.executable, "-c", program], check=True, env=variables)


_VALUES = [1 / 3, 5e-324, 1e22, -1.5, 0.0, "NaN", 1.7976931348623157e308]
_ODD_NAMES = ["a b", "a(b)", "a//b", "/a", "./a", "", "é", "x" * 300, "a:b", "a\nb"]


def _fill(folder: Path, target: Any) -> TrackerFolder:
    found = TrackerFolder(folder)
    run = TrackedRun("", "small", to_plain(target), {"lr": 0.1, "odd (%)": "x" * 900}, created=5)
    store = PointStore(found, run, forks=True)
    store.open(None)
    for number, value in enumerate(_VALUES):
        values = {"loss": value, **dict.fromkeys(_ODD_NAMES, number)}
        store.add({"time": 10 + number, "epoch": 1, "iteration": number, "values": values})
    store.add({"time": 20, "epoch": 1, "iteration": 7, "values": {"inf": "-Infinity", "z": -0.0}})
    file = store_picture(found.pictures, np.full((2, 3, 1), 7, np.uint8))
    store.add({"time": 20, "epoch": 1, "iteration": 7, "picture": "p", "file": file})
    store.close("finished")
    return found


def _check_mlflow(folder: Path, uri: str) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    stored = _fill(folder / "tracker", MLflow(uri))
    run = stored.read_run()
    for _ in range(2):
        sender = Sender(stored, run, connect(stored, run))
        sender.flush()
        sender.finish("finished")
        (stored.path / "sent.json").unlink()
    (found,) = tracked.find_runs(uri)
    run_id, client = found.info.run_id, MlflowClient(uri)
    curves = tracked.stored_curves(stored.path)
    special = {name: curves.pop(name) for name in ("inf", "z")}
    read = tracked.read_mlflow(uri, run_id, [clean(name) for name in curves])
    assert read == {clean(name): points for name, points in curves.items()}
    # What MLflow does not store as it is.
    read = tracked.read_mlflow(uri, run_id, [*special])
    assert read["inf"] == [(7, 20, (-sys.float_info.max).hex())]
    assert read["z"] == [(7, 20, (0.0).hex())]
    assert found.data.params[clean("odd (%)")] == "x" * 500
    for wrong in (
        {"metrics": [Metric("a(", 1.0, 1, 1)]},
        {"metrics": [Metric("a//b", 1.0, 1, 1)]},
        {"params": [Param("lr", "0.2")]},
    ):
        with pytest.raises(Exception, match=r"(?i)invalid|changed"):
            client.log_batch(run_id, **wrong, synchronous=True)
    assert len(client.list_artifacts(run_id, "pictures/p/00000007")) == 1
    text = Path(client.download_artifacts(run_id, "summary.json")).read_text()
    assert json.loads(text)["numbers"]["loss"]["count"] == 7


@pytest.mark.parametrize("kind", ["stand-in", pytest.param("library", marks=needs_wandb)])
def test_the_stand_in_of_wandb_is_faithful(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "library":
        _check_in_child(f"_check_wandb(Path({str(tmp_path)!r}))")
    else:
        with tracked.stand_ins(monkeypatch):
            _check_wandb(tmp_path)


def _check_wandb(folder: Path) -> None:
    stored = _fill(folder / "tracker", WandB("p"))
    for _ in range(2):
        _send(stored.path)
        (run,) = (stored.path / "wandb").glob("offline-run-*")
    history = tracked.read_wandb(run)
    stored_points = tracked.without_times(tracked.stored_curves(stored.path))
    # What W&B does not store.
    del stored_points[""]
    assert tracked.history_curves(history) == stored_points
    assert history[2]["_timestamp"] == 0.012
    assert (run / "files" / history[7]["p"]["path"]).is_file()

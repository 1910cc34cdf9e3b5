"""``WandbLogger`` and ``MlflowLogger``: servers show each point of a killed run once."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helios.plugins import MlflowLogger, Plugin, WandbLogger
from helios.state import TrainingState
from tests.support.kills import kill_self, run_in_child
from tests.support.logged_points import (
    Points,
    mlflow_points,
    mlflow_runs,
    points_of,
    wandb_rows,
)
from tests.support.quiet import Quiet
from tests.support.runs import Setting, replay, train
from tests.support.wandb_server import WandbServer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]
_QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}
# W&B's files have at once what the library was given, or not before the end.
_EAGER, _LAZY = ({"x_transaction_log_flush_interval": pause} for pause in (0.05, 1000.0))
_SECONDS, _PAUSE = 120.0, 0.05
_ALL = [*range(1, 15)]


class Log(Quiet):
    """Logs a number of an awkward name at each epoch; kills the process at an iteration.

    Before, it waits until the last complete row is shown.
    """

    unsaved = ("at", "is_shown")

    def __init__(self, at: int = 0, is_shown: Callable[[int], bool] | None = None) -> None:
        super().__init__("log")
        self.at, self.is_shown = at, is_shown

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.context.log({"/epoch//end (%)": float("nan")})

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        if state.global_iteration == self.at and self.context.global_rank == 0:
            if self.is_shown is not None:
                _wait_for(lambda: self.is_shown(self.at - 2))
            kill_self()


def _wait_for(is_so: Callable[[], bool]) -> None:
    pause, waited = threading.Event(), 0.0
    while not is_so():
        waited += _PAUSE
        assert waited < _SECONDS, "it never was so"
        pause.wait(_PAUSE)


def _setting(processes: int = 1, **options: Any) -> Setting:
    fixed = {"num_replicas": 2, "nproc": processes, "params": {"rate": 0.05}}
    return Setting(print_frequency=1, chkpt_frequency=3, options=fixed | options)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of MLflow."""
    # The libraries are imported before the tests fork.
    import mlflow  # noqa: F401
    import wandb  # noqa: F401

    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder}/runs.db"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    changed = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *place],
            cwd=folder,
            env=os.environ | changed,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return True
        except OSError:
            return False

    try:
        _wait_for(answers)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


class Servers:
    """A server of MLflow, and offline files of W&B, with what they show of the run in a folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.experiment = "-".join(folder.parts[-2:])
        self.log = folder.with_suffix(".log")

    def loggers(self, **settings: Any) -> list[Plugin]:
        return [
            MlflowLogger(self.experiment, tracking_uri=self.address),
            WandbLogger("p", mode="offline", settings=_QUIET | settings),
        ]

    def start(self, setting: Setting, *plugins: Plugin, **settings: Any) -> int:
        loggers = self.loggers(**settings)
        return _in_child(self.folder, lambda: train(self.folder, setting, *loggers, *plugins))

    def runs(self) -> list[Any]:
        return mlflow_runs(self.address, self.experiment)

    def points(self) -> tuple[Points, Points]:
        wandb_points = points_of(wandb_rows(self.folder))
        return mlflow_points(self.address, self.experiment), wandb_points

    def steps(self) -> tuple[list[int], ...]:
        found = (points.get("train/loss", []) for points in self.points())
        return tuple([step for step, _ in each] for each in found)

    def shows(self, iteration: int) -> bool:
        return all(iteration in steps for steps in self.steps())


def _in_child(folder: Path, work: Callable[[], Any]) -> int:
    """Run work in a child, for the libraries leave threads and processes; its log is kept."""

    def logged() -> Any:
        logging.getLogger().addHandler(logging.FileHandler(folder.with_suffix(".log")))
        return work()

    code = run_in_child(logged, folder.with_suffix(".outcome"))
    # W&B's process of a killed start still writes what it was given.
    _wait_for(lambda: not _is_any_at_work(folder.parent))
    return code


def _is_any_at_work(folder: Path) -> bool:
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.parent.name != str(os.getpid()) and path.readlink() == folder:
                return True
        except OSError:
            continue
    return False


@pytest.mark.shows("P63", "P67")
def test_each_point_of_a_killed_run_is_there_once(address: str, tmp_path: Path) -> None:
    """Before the first checkpoint; with points lost on two processes; also after a replay."""
    whole, killed = (Servers(tmp_path / name, address) for name in ("whole", "killed"))
    assert whole.start(_setting(), Log()) == 0
    assert killed.start(_setting(), Log(3, killed.shows), **_EAGER) == -9
    # The process that starts two ranks lives on, and raises. What W&B has not written is lost.
    assert killed.start(_setting(2), Log(6), **_LAZY) == 1
    assert [*killed.folder.rglob("*_iter_3.pth")]
    assert killed.start(_setting(), Log()) == 0
    assert killed.points() == whole.points()
    assert killed.steps() == (_ALL, _ALL)
    assert {"valid/score", "epoch"} < killed.points()[0].keys()
    (run,) = killed.runs()
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params.items() >= {("rate", "0.05"), ("options.total_steps", "14")}
    before, files = whole.points(), sorted(whole.folder.rglob("*.wandb"))

    def repeat() -> None:
        train(whole.folder, _setting(), *whole.loggers())
        found, _ = replay(whole.folder, _setting(), *whole.loggers())
        assert found.is_equal

    assert _in_child(whole.folder, repeat) == 0
    assert whole.points() == before
    assert sorted(whole.folder.rglob("*.wandb")) == files


@pytest.mark.full
def test_a_start_that_changed_something_logs_again_from_its_step_on(
    address: str, tmp_path: Path
) -> None:
    """One that goes back, which is killed, and continued from a checkpoint of its own."""
    servers = Servers(tmp_path / "run", address)
    assert servers.start(_setting()) == 0
    servers.log.unlink()
    once = [points["train/loss"] for points in servers.points()]
    older = servers.folder / "small/small_epoch_2_iter_6.pth"
    back = _setting(resume=str(older))

    def has_saved(_: int) -> bool:
        return any(older.parent.glob("*_iter_9.pth"))

    assert servers.start(back, Log(11, has_saved)) == -9
    assert servers.start(back) == 0
    assert servers.log.read_text().count("logged again from step 7 on") == 2
    twice = [points["train/loss"] for points in servers.points()]
    assert [sorted(points) for points in twice] == [sorted(each + each[6:]) for each in once]


@pytest.mark.shows("P67")
def test_servers_that_are_down_get_all_points_when_they_answer_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down until the end of the run: the same command, run again, sends them."""
    folder, server = tmp_path / "run", WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "0.1")

    def start(uri: str, *plugins: Plugin) -> int:
        loggers = [
            MlflowLogger("down", tracking_uri=uri),
            WandbLogger("p", mode="online", settings=_QUIET | {"init_timeout": 3}),
        ]
        return _in_child(folder, lambda: train(folder, _setting(), *loggers, *plugins))

    def is_shown(step: int) -> bool:
        return step in [row["_step"] for row in server.rows]

    try:
        assert start(address, Log(6, is_shown)) == -9
        server.stop()
        assert start("http://127.0.0.1:1") == 0
        warnings = folder.with_suffix(".log").read_text()
        server.start()
        assert start(address) == 0
        wandb_losses = points_of(server.rows)["train/loss"]
        (run,) = server.runs.values()
    finally:
        server.stop()
    assert warnings.count("could not be sent") == 2
    assert [step for step, _ in wandb_losses] == _ALL
    assert json.loads(run["config"])["rate"]["value"] == 0.05
    assert mlflow_points(address, "down")["train/loss"] == wandb_losses

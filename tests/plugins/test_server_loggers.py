"""``WandbLogger`` and ``MlflowLogger``: servers show each point of a killed run once."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import UsageError
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
from tests.support.runs import IndexModule, Setting, SmallModel, replay, train
from tests.support.wandb_server import WandbServer

pytestmark = pytest.mark.filterwarnings("ignore")
_QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}
# W&B's files have at once what the library was given.
_EAGER = {"x_transaction_log_flush_interval": 0.05}
_SECONDS = 60.0


class Log(Plugin):
    """Logs a number of an awkward name at each epoch, and kills the process at an iteration."""

    unsaved = ("kill_at", "is_shown")

    def __init__(self, kill_at: int = 0, is_shown: Callable[[int], bool] | None = None) -> None:
        super().__init__("log")
        self.kill_at = kill_at
        self.is_shown = is_shown

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.context.log({"/epoch//end (%)": float("nan")})

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        if state.global_iteration == self.kill_at:
            # The row of the iteration before is not complete.
            if self.is_shown is not None and self.context.global_rank == 0:
                _wait_for(lambda: self.is_shown(self.kill_at - 2))
            kill_self()


def _wait_for(is_so: Callable[[], bool]) -> None:
    pause, waited = threading.Event(), 0.0
    while not is_so():
        waited += 0.05
        assert waited < _SECONDS, "it never was so"
        pause.wait(0.05)


def _setting(processes: int = 1, **changed: Any) -> Setting:
    options = {"num_replicas": 2, "nproc": processes, "params": {"rate": 0.05}}
    fixed = {"print_frequency": 1, "chkpt_frequency": 3, "options": options}
    return Setting(**{**fixed, **changed})


class Service:
    """A service, with what the only run there shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def logger(self) -> Plugin:
        raise NotImplementedError

    def points(self) -> Points:
        raise NotImplementedError

    def shows(self, iteration: int) -> bool:
        points = self.points().get("train/loss", [])
        return iteration in [step for step, _ in points]


class Mlflow(Service):
    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}.db"

    def logger(self) -> Plugin:
        return MlflowLogger(tracking_uri=self.uri)

    def points(self) -> Points:
        return mlflow_points(self.uri)


class Wandb(Service):
    settings: dict[str, Any] = _QUIET

    def logger(self) -> Plugin:
        return WandbLogger("p", mode="offline", settings=self.settings)

    def points(self) -> Points:
        return points_of(wandb_rows(self.folder))


class EagerWandb(Wandb):
    settings = _QUIET | _EAGER


SERVICES = [Mlflow, EagerWandb, Wandb]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def _train(service: Service, setting: Setting | None = None, *plugins: Plugin) -> int:
    return _in_child(
        service.folder,
        lambda: train(
            service.folder, setting or _setting(), service.logger(), *(plugins or (Log(),))
        ),
    )


def _in_child(folder: Path, work: Callable[[], Any]) -> int:
    """Run work in a child, for the libraries leave threads and processes; its log is kept."""

    def logged() -> Any:
        logging.getLogger().addHandler(logging.FileHandler(folder.with_suffix(".log")))
        return work()

    return run_in_child(logged, folder.with_suffix(".outcome"))


@pytest.mark.shows("P63")
@pytest.mark.parametrize("kind", SERVICES)
def test_each_point_of_a_killed_run_is_there_once(kind: type[Service], tmp_path: Path) -> None:
    """Before the first checkpoint; with points sent that are repeated; on one process and two."""
    whole, killed = kind(tmp_path / "whole"), kind(tmp_path / "killed")
    assert _train(whole) == 0
    waits = None if kind is Wandb else killed.shows
    for at, processes, is_shown in [(3, 1, waits), (6, 2, None), (9, 1, waits)]:
        code = _train(killed, _setting(processes), Log(at, is_shown))
        # The process that starts two ranks lives on, and raises.
        assert code == (-9 if processes == 1 else 1)
    assert _train(killed) == 0
    assert killed.points() == whole.points()
    assert [step for step, _ in whole.points()["train/loss"]] == [*range(1, 15)]
    assert {"valid/score", "epoch"} < whole.points().keys()


@pytest.mark.shows("P63")
@pytest.mark.parametrize("kind", SERVICES[:2])
def test_a_start_that_changed_something_logs_again_from_its_step_on(
    kind: type[Service], tmp_path: Path
) -> None:
    """One that goes back, which is killed, and continued from a checkpoint of its own."""
    service = kind(tmp_path / "run")
    assert _train(service) == 0
    log = service.folder.with_suffix(".log")
    log.unlink()
    once = service.points()["train/loss"]
    older = service.folder / "small/small_epoch_2_iter_6.pth"
    back = _setting()
    back.options["resume"] = str(older)

    def has_saved(_: int) -> bool:
        return any(older.parent.glob("*_iter_9.pth"))

    assert _train(service, back, Log(11, has_saved)) == -9
    assert _train(service, back) == 0
    assert log.read_text().count("logged again from step 7 on") == 1
    assert sorted(service.points()["train/loss"]) == sorted(once + once[6:])


@pytest.mark.parametrize("kind", SERVICES[:2])
def test_a_start_with_other_values_before_the_first_checkpoint_is_noticed(
    kind: type[Service], tmp_path: Path
) -> None:
    """As after an edit of the code."""
    service = kind(tmp_path / "run")
    assert _train(service, None, Log(3, service.shows)) == -9
    assert _train(service, _setting(batch_size=3)) == 0
    assert "logged again from step 1 on" in service.folder.with_suffix(".log").read_text()
    assert [step for step, _ in service.points()["train/loss"]].count(1) == 2


def test_a_start_with_other_parameters_before_the_first_checkpoint_is_another_run(
    tmp_path: Path,
) -> None:
    service, other = Mlflow(tmp_path / "run"), _setting()
    assert _train(service, None, Log(3, service.shows)) == -9
    other.options["params"] = {"rate": 0.1}
    assert _train(service, other) == 0
    runs = {run.data.params["rate"]: run.info.status for run in mlflow_runs(service.uri)}
    assert runs == {"0.1": "FINISHED", "0.05": "RUNNING"}


def test_mlflow_has_parameters_options_and_scores_of_tests(tmp_path: Path) -> None:
    service, setting = Mlflow(tmp_path / "run"), _setting()

    def fit_and_test() -> dict[str, float]:
        model, data = SmallModel(setting), IndexModule(setting)
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=14,
            chkpt_frequency=7,
            chkpt_root=service.folder,
            use_cpu=True,
            params={"rate": 0.05},
            plugins=[service.logger()],
        )
        trainer.fit(model, data)
        for _ in range(2):
            trainer.test(model, data)
        return {f"test/{name}": float(value) for name, value in model.test_scores.items()}

    assert _in_child(service.folder, fit_and_test) == 0
    scores = pickle.loads(service.folder.with_suffix(".outcome").read_bytes())
    (run,) = mlflow_runs(service.uri)
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params.items() >= {("rate", "0.05"), ("options.total_steps", "14")}
    points = service.points()
    assert scores
    assert {name: points[name] for name in scores} == {
        name: [(14, repr(value))] for name, value in scores.items()
    }


@pytest.mark.shows("P67")
def test_a_server_of_mlflow_that_is_down_costs_one_warning(tmp_path: Path) -> None:
    """What it has not got is in the checkpoint, and sent by the next start."""
    service, down = Mlflow(tmp_path / "run"), "http://127.0.0.1:1"
    logger, setting = MlflowLogger(tracking_uri=down), _setting(total_steps=9)
    assert _in_child(service.folder, lambda: train(service.folder, setting, logger)) == 0
    assert service.folder.with_suffix(".log").read_text().count("cannot be reached") == 1
    assert _train(service) == 0
    assert [step for step, _ in service.points()["train/loss"]] == [*range(1, 15)]


@pytest.mark.shows("P67")
def test_wandb_online_has_each_point_once_although_the_server_was_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "0.1")
    folder = tmp_path / "run"

    def start(*plugins: Plugin) -> int:
        logger = WandbLogger("p", mode="online", settings=_QUIET | {"init_timeout": 3})
        return _in_child(folder, lambda: train(folder, _setting(), logger, *plugins))

    try:
        assert start(Log(6, lambda step: step in [row["_step"] for row in server.rows])) == -9
        server.stop()
        assert start(Log(9)) == -9
        server.start()
        assert start() == 0
        losses = points_of(server.rows)["train/loss"]
        (run,) = server.runs.values()
    finally:
        server.stop()
    assert folder.with_suffix(".log").read_text().count("cannot be reached") == 1
    assert [step for step, _ in losses] == [*range(1, 15)]
    assert json.loads(run["config"])["rate"]["value"] == 0.05


def test_a_replay_sends_nothing(tmp_path: Path) -> None:
    service = Wandb(tmp_path / "run")
    assert _train(service) == 0
    before = wandb_rows(tmp_path)
    setting = _setting()
    found, _ = replay(service.folder, setting, service.logger(), Log())
    assert found.is_equal
    assert wandb_rows(tmp_path) == before


@pytest.mark.parametrize(("kind", "library"), [(WandbLogger, "wandb"), (MlflowLogger, "mlflow")])
def test_a_library_that_is_not_installed_is_one_error_with_the_command(
    kind: Any, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf'pip install "helios-trainer\[{library}\]"'):
        kind("project")

"""``Tracker``: what a server shows of a killed run is what it shows of an undisturbed one."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios import cli
from helios.errors import ArgumentError, ArgumentTypeError, FolderInUseError, UsageError
from helios.plugins import MLflow, Plugin, Tracker, WandB
from helios.state import TrainingState
from helios.storage.folder_lock import FolderLock
from tests.support import tracked
from tests.support.kills import KillAt, train_in_child
from tests.support.paused import another_process
from tests.support.ranks import run_ranks
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel, replay, train

pytestmark = pytest.mark.usefixtures("stand_in_libraries")
_PLACES = (
    ("on_log", 1),
    ("on_validation_end", 6),
    ("on_save_checkpoint", 8),
    ("on_training_end", 14),
)


class Painter(Plugin):
    """Logs numbers at epochs, and a picture at each validation."""

    def __init__(self) -> None:
        super().__init__("painter")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_fit_start(self) -> None:
        self._tracker = self.trainer.plugins["tracker"]
        if self.context.state.global_iteration == 0:
            self.context.log({"early": 0.5})

    unsaved = ("_tracker",)

    def on_validation_end(self, validation_cycle: int) -> None:
        shade = validation_cycle / 16
        self._tracker.add_image("shade", torch.full((1, 2, 2), shade))

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.context.log({"epoch end": 1 / 3, "nan": float("nan")})


def _setting(**changed: Any) -> Setting:
    return Setting(**{"print_frequency": 1, "chkpt_frequency": 2, **changed})


def _tracker(folder: Path, uri: str = "sqlite:///none.db", **options: Any) -> Tracker:
    options = {"sends": False, "params": {"lr": 0.05}, **options}
    return Tracker(folder / "tracker", MLflow(uri), **options)


def _run(folder: Path, setting: Setting | None = None, **options: Any) -> Outcome:
    return train(folder, setting or _setting(), _tracker(folder, **options), Painter())


def _rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "tracker" / "points.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _without_times(folder: Path) -> list[dict[str, Any]]:
    return [{**row, "time": 0} for row in _rows(folder)]


def _send(folder: Path) -> None:
    assert cli.main(["send", str(folder / "tracker")]) == 0


@pytest.mark.shows("P63")
def test_killed_runs_show_the_points_of_the_undisturbed_one(tmp_path: Path, uri: str) -> None:
    """Sent after every kill, so that most points were sent before they are repeated."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(whole)
    for event, iteration in _PLACES:
        plugins = (_tracker(killed, uri), Painter(), KillAt(event, iteration))
        assert train_in_child(killed, _setting(), *plugins) == -9
        _send(killed)
        (run,) = tracked.find_runs(uri)
        assert run.info.status == "KILLED"
    assert train_in_child(killed, _setting(), _tracker(killed, uri), Painter()) == 0
    _send(killed)
    assert _without_times(killed) == _without_times(whole)
    (run,) = tracked.find_runs(uri)
    assert run.info.status == "FINISHED"
    stored = tracked.stored_curves(killed / "tracker")
    assert tracked.read_mlflow(uri, run.info.run_id, [*stored]) == stored
    assert [step for step, _, _ in stored["train/loss"]] == [*range(1, 15)]
    assert run.data.params["lr"] == "0.05"
    assert run.data.params["options.total_steps"] == "14"
    files = tmp_path / "server.files" / run.info.run_id
    assert sorted(path.name for path in files.iterdir()) == ["pictures", "summary.json"]
    assert len([*files.glob("pictures/shade/*/*.png")]) == 4


@pytest.mark.shows("P63")
def test_any_checkpoint_continues_the_same_points(tmp_path: Path) -> None:
    """Whatever a kill has left of the points after the checkpoint; the times of those stay."""
    setting = _setting(chkpt_frequency=1)
    whole = tmp_path / "whole"

    def resume(folder: Path) -> Outcome:
        shutil.copytree(whole / "tracker", folder / "tracker")
        path = folder / "tracker" / "points.jsonl"
        text = path.read_text()
        (checkpoint,) = folder.glob("*/*.pth")
        size = _mark_of(checkpoint)
        path.write_text(text[: size + (len(text) - size) // 2])
        outcome = _run(folder, setting)
        if not outcome.has_ended:
            return outcome
        assert _without_times(folder) == _without_times(whole)
        kept = path.read_text()[: size + (len(text) - size) // 2].rpartition("\n")[0]
        assert text.startswith(kept)
        before, after = (
            json.loads((each / "tracker" / "tracker.json").read_text())["key"]
            for each in (whole, folder)
        )
        assert before == after
        return outcome

    resume_everywhere(lambda folder: _run(folder, setting), tmp_path, make_resumed=resume)


def _mark_of(checkpoint: Path) -> int:
    found = helios.load_checkpoint(checkpoint)
    return int(found["plugins"]["tracker"]["mark"]["size"])


@pytest.mark.shows("P66")
def test_going_back_on_purpose_is_another_run(tmp_path: Path, uri: str) -> None:
    """By the path of a checkpoint, with other values at the same iterations."""
    setting = _setting()
    _run(tmp_path / "a", setting, uri=uri)
    _send(tmp_path / "a")
    before = _rows(tmp_path / "a")
    (path,) = (tmp_path / "a").glob("*/*_iter_8.pth")
    setting = _setting(options={"resume": path, "clip_norm": 1e-3})
    _run(tmp_path / "a", setting, uri=uri)
    _send(tmp_path / "a")
    after = _rows(tmp_path / "a")
    runs = tracked.find_runs(uri)
    assert len(runs) == 2
    curves = [
        tracked.read_mlflow(uri, run.info.run_id, ["train/loss"])["train/loss"] for run in runs
    ]
    for rows in (before, after):
        losses = [
            (row["iteration"], row["time"], row["values"]["train/loss"].hex())
            for row in rows
            if "train/loss" in row.get("values", {})
        ]
        assert losses in curves
    assert before[:8] == after[:8]


@pytest.mark.shows("P67")
def test_an_evaluation_and_a_replay_store_nothing(tmp_path: Path) -> None:
    setting = _setting()
    _run(tmp_path, setting)
    before = _rows(tmp_path)
    replay(tmp_path, setting, _tracker(tmp_path), Painter(), start=3, stop=9)
    trainer = helios.Trainer(
        total_steps=14,
        train_unit="iteration",
        chkpt_root=tmp_path,
        use_cpu=True,
        print_banner=False,
        plugins=[_tracker(tmp_path)],
    )
    trainer.test(SmallModel(setting), IndexModule(setting))
    assert _rows(tmp_path) == before


class Slow(Plugin):
    """Waits, before a kill, until some points were acknowledged; notes what is imported."""

    def __init__(self, folder: Path) -> None:
        super().__init__("slow")
        self.folder = folder

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == 6:
            pause = threading.Event()
            while not (self.folder / "tracker" / "sent.json").exists():
                pause.wait(0.05)
            imported = {"mlflow", "wandb"} & sys.modules.keys()
            (self.folder / "imported").write_text(str(sorted(imported)))


def wait_until_free(folder: Path) -> None:
    """Wait until no sender has the folder."""
    pause = threading.Event()
    while True:
        try:
            with FolderLock(folder):
                return
        except FolderInUseError:
            pause.wait(0.05)


@pytest.mark.shows("P67")
def test_points_arrive_while_training_runs_and_a_kill_ends_the_sender(
    tmp_path: Path, uri: str
) -> None:
    plugins = [_tracker(tmp_path, uri, sends=True), Painter(), Slow(tmp_path)]
    assert train_in_child(tmp_path, _setting(), *plugins, KillAt("on_training_batch_end", 7)) == -9
    # The training itself has imported no library.
    assert (tmp_path / "imported").read_text() == "[]"
    (run,) = tracked.find_runs(uri)
    assert run.info.status == "RUNNING"
    _run(tmp_path, uri=uri)
    wait_until_free(tmp_path / "tracker")
    (tmp_path / "tracker" / "sent.json").unlink()
    _send(tmp_path)
    (run,) = tracked.find_runs(uri)
    assert run.info.status == "FINISHED"
    stored = tracked.stored_curves(tmp_path / "tracker")
    assert tracked.read_mlflow(uri, run.info.run_id, [*stored]) == stored


@pytest.mark.shows("P64")
def test_a_dead_server_is_a_warning_and_keeps_the_points(
    tmp_path: Path, uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.db.down").touch()
    _run(tmp_path, uri=uri, sends=True)
    found = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(found) == 2
    assert "cannot send its points: ConnectionError: the server is down. They are kept" in found[0]
    assert f"helios send {tmp_path / 'tracker'}" in found[1]
    (tmp_path / "server.db.down").unlink()
    _send(tmp_path)
    (run,) = tracked.find_runs(uri)
    stored = tracked.stored_curves(tmp_path / "tracker")
    assert tracked.read_mlflow(uri, run.info.run_id, [*stored]) == stored


@pytest.mark.shows("P64")
@pytest.mark.parametrize("target", [MLflow("u"), WandB("p")])
def test_a_sender_that_hangs_is_not_waited_for(
    target: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    slow = tmp_path / "slow" / "helios"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(slow.parent), prepend=":")
    monkeypatch.chdir(tmp_path)  # python -c looks in the current folder first
    train(tmp_path, _setting(), Tracker(tmp_path / "tracker", target, patience=0.1))
    assert "Not all points" in capfd.readouterr().err


def test_a_process_that_cannot_be_started_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    _run(tmp_path, sends=True)
    assert "could not be started" in capfd.readouterr().err
    assert len(_rows(tmp_path)) > 14


def test_a_failed_training_says_so(tmp_path: Path) -> None:
    class Failing(Plugin):
        def __init__(self, error: BaseException) -> None:
            super().__init__("failing")
            self.error = error

        unsaved = ("error",)

        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            raise self.error

    for error, outcome in ((ValueError("no"), "failed"), (KeyboardInterrupt(), "killed")):
        with pytest.raises(type(error)):
            train(tmp_path / outcome, _setting(), _tracker(tmp_path / outcome), Failing(error))
        run = json.loads((tmp_path / outcome / "tracker" / "tracker.json").read_text())
        assert run["outcome"] == outcome


def _train_ranks(rank: int, folder: Path) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=14,
        valid_frequency=3,
        chkpt_frequency=2,
        print_frequency=1,
        chkpt_root=folder,
        num_replicas=2,
        random_seed=5,
        print_banner=False,
        use_cpu=True,
        plugins=[_tracker(folder), Painter()],
    )
    trainer.fit(SmallModel(_setting()), IndexModule(_setting()))


@pytest.mark.shows("P67")
def test_rank_0_stores_what_all_processes_log(tmp_path: Path) -> None:
    _train_ranks(0, tmp_path / "one")
    run_ranks(_train_ranks, 2, tmp_path / "two")
    assert _without_times(tmp_path / "two") == _without_times(tmp_path / "one")


class PauseAt(Plugin):
    """Pauses the training in the middle."""

    def __init__(self, pause: Callable[[], Any]) -> None:
        super().__init__("pause")
        self.pause = pause

    unsaved = ("pause",)

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == 6:
            self.pause()


class Started(Plugin):
    """Fails the test if a step is made."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_start(self, state: TrainingState) -> None:
        raise AssertionError("training has started")


@pytest.mark.shows("P84")
def test_a_second_training_with_the_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Before its first step; without the lock, the rows of both were mixed."""
    _run(tmp_path / "whole")
    shared = tmp_path / "first"

    def first(pause: Callable[[], Any]) -> None:
        train(shared, _setting(), _tracker(shared), Painter(), PauseAt(pause))

    with another_process(first) as pid:
        for options in ({}, {"params": {"lr": 1.0}}):
            second = _setting(seed=7)
            plugins = (_tracker(shared, **options), Painter(), Started("started"))
            with pytest.raises(FolderInUseError, match=f"process {pid} .* each Tracker a folder"):
                train(tmp_path / "second", second, *plugins)
    assert _without_times(shared) == _without_times(tmp_path / "whole")
    assert sorted(path.name for path in shared.iterdir()) == ["small", "tracker"]
    _run(shared)


@pytest.mark.shows("P84")
def test_two_trackers_with_one_folder_are_refused(tmp_path: Path) -> None:
    plugins = [_tracker(tmp_path), _tracker(tmp_path, plug_id="other"), Started("started")]
    with pytest.raises(FolderInUseError, match="each Tracker a folder of its own"):
        train(tmp_path, _setting(), *plugins)
    assert list((tmp_path / "tracker").glob(".helios*")) == []


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Tracker(3, MLflow("u")), ArgumentTypeError, "must be a path"),
        (lambda: Tracker(__file__, MLflow("u")), ArgumentError, "must be a folder"),
        (lambda: Tracker("t", "mlflow"), ArgumentTypeError, "must be MLflow"),
        (lambda: Tracker("t", MLflow("u"), params=[1]), ArgumentTypeError, "a mapping"),
        (lambda: Tracker("t", MLflow("u"), params={"a": [1]}), ArgumentTypeError, "'a': \\[1\\]"),
        (lambda: Tracker("t", MLflow("u"), params={1: 1}), ArgumentTypeError, "1: 1"),
        (lambda: Tracker("t", MLflow("u"), patience=-1), ArgumentError, "patience"),
    ],
)
def test_arguments_are_checked(
    make: Callable[[], Tracker], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


def test_a_library_that_is_missing_is_an_error_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("helios.plugins.tracker.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install \"helios-trainer\[wandb\]\""):
        Tracker("t", WandB("p"))
    assert Tracker("t", WandB("p"), sends=False).folder == Path("t").absolute()

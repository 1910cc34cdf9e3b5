"""Replays: a part of a run is repeated and compared, and nothing of the run is touched."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.errors import (
    ArgumentError,
    DamagedCheckpointError,
    RunMismatchError,
    UsageError,
)
from helios.ledger.book import FILE_NAME
from helios.ledger.compare import END, ORDER, RATES, WEIGHTS
from helios.plugins import CSVLogger, JSONLLogger, Plugin, Profiler
from helios.state import TrainingState
from tests.support.paused import locked
from tests.support.quiet import Quiet
from tests.support.resume import assert_equal, assert_events_join, iteration_of, restarts_of
from tests.support.runs import Outcome, Setting, replay, train

STEPS = Setting(total_steps=14, chkpt_frequency=4)
EPOCHS = Setting(unit="epoch", total_steps=3, valid_frequency=1, batch_size=6, accumulation=3)
WINDOWS = Setting(total_steps=8, chkpt_frequency=2, accumulation=3, batch_size=2)
SETTINGS = {"iterations": STEPS, "epochs": EPOCHS, "windows": WINDOWS}


class AtBatch(Quiet):
    """Does something at the end of each batch."""

    unsaved = ("act",)

    def __init__(self, act: Any) -> None:
        super().__init__("at-batch")
        self.act = act

    def on_training_batch_start(self, state: TrainingState) -> None:
        self.act(self, state)


def _at(iteration: int, act: Any) -> AtBatch:
    return AtBatch(lambda plugin, state: state.global_iteration == iteration and act(plugin))


def _raise(error: BaseException) -> None:
    raise error


def contents(folder: Path) -> dict[str, Any]:
    """Return name, content and time of change of all that is in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in (folder, *sorted(folder.rglob("*")))
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Return the folder and the outcome of an undisturbed run of each setting."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: (folder / name, train(folder / name, each)) for name, each in SETTINGS.items()}


@pytest.fixture
def whole(runs: dict[str, tuple[Path, Outcome]]) -> Path:
    return runs["iterations"][0]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pth"), key=iteration_of)


def _copy(folder: Path, target: Path, *, last: int) -> Path:
    """Copy what a run has left when it was killed after an iteration."""
    shutil.copytree(folder, target)
    for path in _checkpoints(target):
        if iteration_of(path) > last:
            path.unlink()
            path.with_suffix(".json").unlink()
    (ledger,) = target.glob(f"*/{FILE_NAME}")
    lines = ledger.read_bytes().splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if f",{last + 1},".encode() in line)
    ledger.write_bytes(b"".join(lines[:end]))
    return target


@pytest.mark.shows("P31")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_is_repeated_from_its_beginning_and_from_every_checkpoint(
    name: str, runs: dict[str, tuple[Path, Outcome]]
) -> None:
    folder, whole = runs[name]
    last = max(whole.records)
    found, repeated = replay(folder, SETTINGS[name], start=0)
    assert (found.is_equal, found.begins_after, found.num_equal) == (True, 0, last)
    assert (found.checkpoint, found.has_ended) == (None, True)
    assert_equal(repeated, whole, since=0)
    for path in restarts_of(_checkpoints(folder))[:-1]:
        since = iteration_of(path)
        found, repeated = replay(folder, SETTINGS[name], start=since)
        assert (found.is_equal, found.begins_after, found.num_equal) == (True, since, last)
        assert (found.checkpoint, found.has_ended) == (path, True)
        assert_equal(repeated, whole, since=since)
        assert_events_join(repeated, whole, since=since)
        assert set(repeated.saves) == {each for each in whole.saves if each > since}


@pytest.mark.parametrize(
    ("name", "stop", "last"),
    [
        ("iterations", 9, 9),
        ("windows", 9, 9),
        ("windows", 11, 12),
        ("epochs", 5, 7),
        ("epochs", 4, 4),
    ],
)
def test_a_replay_ends_at_its_stop_or_with_its_window(
    name: str, stop: int, last: int, runs: dict[str, tuple[Path, Outcome]]
) -> None:
    folder, whole = runs[name]
    found, repeated = replay(folder, SETTINGS[name], stop=stop)
    assert (found.is_equal, found.num_equal, found.has_ended) == (True, stop, False)
    assert max(repeated.records) == last
    assert not repeated.has_ended
    assert repeated.events[-1][0] == "teardown"
    assert "on_training_end" not in {event[0] for event in repeated.events}
    assert whole.records.items() >= repeated.records.items()


@pytest.mark.shows("P31")
def test_an_interrupted_run_is_repeated_up_to_its_last_line(whole: Path, tmp_path: Path) -> None:
    folder = _copy(whole, tmp_path / "run", last=11)
    (ledger,) = folder.glob(f"*/{FILE_NAME}")
    with ledger.open("ab") as file:
        file.write(b'{"at":[2,12,12],"da')
    found, repeated = replay(folder, STEPS, start=9)
    assert (found.is_equal, found.begins_after, found.num_equal) == (True, 8, 11)
    assert max(repeated.records) == 11


def _options(folder: Path) -> dict[str, Any]:
    return {
        "enable_tensorboard": True,
        "run_path": folder / "events",
        "enable_file_logging": True,
        "log_path": folder / "logs",
    }


def _loggers(folder: Path) -> list[Plugin]:
    rows = (CSVLogger(folder / "rows.csv"), JSONLLogger(folder / "rows.jsonl"))
    return [*rows, Profiler(folder / "traces", wait=0, warmup=1, active=1)]


@pytest.mark.shows("P33")
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, None), (4, KeyboardInterrupt()), (4, RuntimeError("planted"))],
    ids=["whole", "Ctrl-C", "error"],
)
def test_a_replay_writes_nothing(
    start: int, end: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    store = helios.CheckpointStore(keep_last=2, keep_best=helios.KeepBest(1, "score", "max"))
    setting = dataclasses.replace(
        STEPS, print_frequency=2, options=_options(folder) | {"store": store}
    )
    setting = dataclasses.replace(setting, chkpt_frequency=4 if start == 0 else 3)
    train(folder, setting, *_loggers(folder))
    before = contents(folder)
    assert {"rows.csv", "rows.jsonl", "events", "logs", "traces"} <= set(before)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(scratch)
    plugins = _loggers(folder)
    part = {"start": 0} if start == 0 else {}
    if end is None:
        assert replay(folder, setting, *plugins, **part)[0].is_equal
    else:
        with pytest.raises(type(end)):
            replay(folder, setting, *plugins, _at(13, lambda plugin: _raise(end)), **part)
    assert contents(folder) == before
    assert not list(scratch.iterdir())


@pytest.mark.shows("P33")
def test_a_replay_needs_no_lock(whole: Path) -> None:
    with locked(whole / "small"):
        assert replay(whole, STEPS, start=8)[0].is_equal


def _double_rate(plugin: Plugin) -> None:
    for group in plugin.trainer.model.optimizer.param_groups:
        group["lr"] *= 2


@pytest.mark.shows("P32")
def test_a_changed_script_is_found_where_it_differs_first(whole: Path) -> None:
    found, repeated = replay(whole, STEPS, _at(7, _double_rate))
    assert (found.is_equal, found.num_equal, found.iteration) == (False, 6, 7)
    assert found.what[0] == RATES
    # No later iteration can tell more.
    assert max(repeated.records) == 7
    assert not repeated.has_ended


def test_another_definition_is_named_or_refused(whole: Path) -> None:
    setting = dataclasses.replace(STEPS, seed=6)
    found, _ = replay(whole, setting, start=0)
    assert (found.iteration, found.what[0], found.has_same_definition) == (1, ORDER, False)
    with pytest.raises(RunMismatchError, match="random_seed"):
        replay(whole, setting)


@pytest.mark.shows("P32")
@pytest.mark.parametrize(("steps", "iteration"), [(10, 11), (20, 15)])
def test_another_end_is_a_difference(steps: int, iteration: int, whole: Path) -> None:
    found, repeated = replay(whole, dataclasses.replace(STEPS, total_steps=steps))
    assert (found.is_equal, found.iteration, found.what) == (False, iteration, [END])
    assert max(repeated.records) == min(steps, 15)


class Harmful(Quiet):
    """Changes a weight after the last update, which no loss shows."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == 14:
            with torch.no_grad():
                self.trainer.model.net[4].bias.add_(1)


@pytest.mark.shows("P32")
def test_weights_that_differ_at_the_end_only_are_found(whole: Path) -> None:
    found, _ = replay(whole, STEPS, Harmful("harmful"), start=12)
    assert (found.is_equal, found.num_equal, found.iteration) == (False, 14, 14)
    assert found.what == [WEIGHTS]
    assert replay(whole, STEPS, Harmful("harmful"), start=12, stop=13)[0].is_equal


@pytest.mark.shows("P35")
def test_the_run_decides_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the beginning, where no checkpoint is loaded."""
    seen: list[int] = []

    def see(plugin: Plugin, state: TrainingState) -> None:
        seen.append(torch.get_num_threads())
        plugin.trainer.model.optimizer.param_groups[0]["lr"] = 0.01 * torch.get_num_threads()

    setting = dataclasses.replace(
        STEPS, scheduler="", total_steps=4, chkpt_frequency=2, valid_frequency=None
    )
    torch.set_num_threads(2)
    try:
        train(tmp_path, setting, AtBatch(see))
    finally:
        torch.set_num_threads(1)
    assert replay(tmp_path, setting, AtBatch(see), start=0)[0].is_equal
    assert replay(tmp_path, setting, AtBatch(see), start=2)[0].is_equal
    assert set(seen) == {2}
    for path in _checkpoints(tmp_path):
        path.unlink()
    found, _ = replay(tmp_path, setting, AtBatch(see), start=0)
    assert (found.iteration, found.what[0]) == (1, RATES)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"start": 14}, r"start=\.\.\.\) must be below 14.*got 14"),
        ({"stop": 15}, r"stop=\.\.\.\) must be .*holds 1 to 14, got 15"),
        ({"start": -1}, r"start=\.\.\.\) must be None or an int of at least 0, got -1"),
        ({"start": 5, "stop": 5}, r"stop=\.\.\.\) must be above start=5, got 5"),
    ],
    ids=str,
)
def test_iterations_that_the_ledger_does_not_hold_are_refused(
    part: dict[str, Any], message: str, whole: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        replay(whole, STEPS, **part)


def test_a_damaged_checkpoint_is_reported_and_kept(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    path = _checkpoints(folder)[0]
    path.write_bytes(path.read_bytes()[:-100])
    before = contents(folder)
    with pytest.raises(DamagedCheckpointError):
        replay(folder, STEPS)
    assert contents(folder) == before
    assert replay(folder, STEPS, start=8)[0].is_equal


class Incomplete(Quiet):
    """Holds what no checkpoint can hold."""

    def setup(self) -> None:
        self.held = iter(range(3))

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.held = iter(range(state.global_iteration))


@pytest.mark.shows("P34")
def test_below_restart_a_replay_is_refused(tmp_path: Path) -> None:
    train(tmp_path, STEPS, Incomplete("incomplete"))
    before = contents(tmp_path)
    for part in ({}, {"start": 0}):
        with pytest.raises(UsageError, match=r"level 'restart' or 'elastic'.*'incomplete'.*iter_"):
            replay(tmp_path, STEPS, Incomplete("incomplete"), **part)
    assert contents(tmp_path) == before

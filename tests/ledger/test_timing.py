"""The times of a run: few lines, which cost a run nothing and stop none."""

from __future__ import annotations

import dataclasses
import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helios.best import BestValidation
from helios.core.utils import AverageTimer, find_peak_memory
from helios.ledger.run_facts import read_curves, read_run
from helios.ledger.timing import FILE_NAME, Timing, read_timing
from helios.loops import epoch
from helios.plugins import Plugin
from helios.startup import run_evidence
from helios.state import TrainingState
from helios.storage import files
from tests.support.runs import Setting, train
from tests.support.warned import collect_warnings

SETTING = Setting(total_steps=6, chkpt_frequency=3, valid_frequency=2)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def _train_on(timing: Timing, clock: Clock, iterations: range, *, step: float) -> None:
    timing.begin(iterations.start - 1)
    for iteration in iterations:
        clock.time += step
        timing.note(iteration)
    timing.close()


@pytest.mark.shows("P42")
def test_a_run_has_its_start_its_times_and_all_scores(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    found = read_timing(tmp_path / "small")
    (start,) = found.starts
    assert (start["iteration"], start["processes"]) == (0, 1)
    (stretch,) = found.lines
    assert (stretch["iteration"], stretch["iterations"]) == (6, 6)
    peaks = {name: stretch.get(name, 0) for name in find_peak_memory()}
    assert all(peak > 1 << 20 for peak in peaks.values()), peaks
    assert [line["iteration"] for line in found.scores] == [2, 4, 6]
    assert "improved" in found.scores[0]
    train(tmp_path, dataclasses.replace(SETTING, total_steps=9))
    found = read_timing(tmp_path / "small")
    assert [start["iteration"] for start in found.starts] == [0, 6]
    assert [line["iterations"] for line in found.lines] == [6, 3]


def test_with_ledger_off_there_are_no_times(tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(SETTING, options={"ledger": "off"}))
    assert not (tmp_path / "small" / FILE_NAME).exists()


@pytest.mark.shows("P42")
@pytest.mark.parametrize("step", [0.005, 12.0])
def test_a_million_iterations_stay_below_two_megabytes(step: float, tmp_path: Path) -> None:
    clock = Clock()
    timing = Timing(tmp_path, processes=4, run="a", clock=clock)
    timing.begin(0)
    for iteration in range(64, 1_000_001, 64):
        clock.time += 64 * step
        timing.note(iteration)
    timing.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 300_000
    found = read_timing(tmp_path)
    assert found.seconds == pytest.approx(1_000_000 * step)
    assert sum(line["iterations"] for line in found.lines) == 1_000_000
    assert 200 < len(found.lines) < 3_000


def test_saves_at_every_iteration_add_no_lines(tmp_path: Path) -> None:
    clock = Clock()
    timing = Timing(tmp_path, processes=1, run="a", clock=clock)
    _train_on(timing, clock, range(1, 101), step=0.25)
    assert [line["iteration"] for line in read_timing(tmp_path).lines] == list(range(4, 101, 4))


@pytest.mark.shows("P42")
def test_repeated_iterations_count_once_but_their_time_does(tmp_path: Path) -> None:
    clock = Clock()
    timing = Timing(tmp_path, processes=1, run="a", clock=clock)
    _train_on(timing, clock, range(1, 31), step=0.125)
    timing.begin(8)
    timing.add_scores(20, {"score": 1.0}, step=10, has_improved=True, best=None, by_hand={})
    # A kill closes nothing.
    timing = Timing(tmp_path, processes=2, run="a", clock=clock)
    _train_on(timing, clock, range(9, 33), step=0.25)
    found = read_timing(tmp_path)
    assert [line["iteration"] for line in found.lines] == [8, 12, 16, 20, 24, 28, 32]
    assert found.seconds == 3.75 + 6.0
    assert found.scores == []
    timing.begin(0)
    found = read_timing(tmp_path)
    assert (found.seconds, found.lines, len(found.starts)) == (9.75, [], 4)


@pytest.mark.shows("P42")
def test_the_time_of_another_run_in_the_folder_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    for run in ("a", "b"):
        timing = Timing(tmp_path, processes=1, run=run, clock=clock)
        _train_on(timing, clock, range(1, 9), step=1.0)
        found = read_timing(tmp_path)
        assert (found.seconds, len(found.starts)) == (8.0, 1)


class Slow(Plugin):
    """Training whose parts take known times; may die in an iteration."""

    unsaved = ("clock", "dies_in", "average")

    def __init__(self, clock: Clock, dies_in: int = 0) -> None:
        super().__init__("slow")
        self.clock = clock
        self.dies_in = dies_in
        self.average = 0.0

    def setup(self) -> None: ...

    def on_fit_start(self) -> None:
        self.clock.time += 50.0

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.clock.time += 0.5
        if state.global_iteration == self.dies_in:
            raise ValueError("no memory")

    def on_validation_start(self, validation_cycle: int) -> None:
        self.clock.time += 100.0

    def on_training_end(self) -> None:
        self.average = self.context.state.average_iter_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the trainings of a test."""
    clock = Clock()
    monkeypatch.setattr(run_evidence, "Timing", partial(Timing, clock=clock))
    monkeypatch.setattr(epoch, "AverageTimer", partial(AverageTimer, clock=clock))
    return clock


@pytest.mark.shows("P42")
def test_the_time_of_a_start_without_a_checkpoint_counts(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(ValueError, match="no memory"):
        train(tmp_path, dataclasses.replace(SETTING, chkpt_frequency=6), Slow(clock, dies_in=6))
    train(tmp_path, dataclasses.replace(SETTING, chkpt_frequency=6), Slow(clock))
    # The sixth iteration of the first start was not completed.
    died, ended = 50.0 + 5 * 0.5 + 2 * 100.0, 50.0 + 6 * 0.5 + 3 * 100.0
    assert read_timing(tmp_path / "small").seconds == died + ended


@pytest.mark.shows("P42")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_iterations_have_their_own_time(unit: str, tmp_path: Path, clock: Clock) -> None:
    """Lines of the ledger are composed many at a time; times are not."""
    slow, is_by_epoch = Slow(clock), unit == "epoch"
    setting = Setting(
        unit=unit,
        total_steps=20 if is_by_epoch else 120,
        valid_frequency=18 if is_by_epoch else 105,
        chkpt_frequency=300,
    )
    train(tmp_path, setting, slow)
    lines = read_timing(tmp_path / "small").lines
    assert sum(line["iterations"] for line in lines) == 120
    assert sum(line.get("paused", 0.0) for line in lines) == 150.0
    own = {(line["seconds"] - line.get("paused", 0.0)) / line["iterations"] for line in lines}
    assert own == {0.5}
    assert slow.average == pytest.approx(0.5)
    (speeds,) = read_curves(read_run(tmp_path / "small")).throughput.values()
    assert {*speeds[1]} == {2.0}


def test_scores_that_json_does_not_have_are_read_again(tmp_path: Path) -> None:
    timing = Timing(tmp_path, processes=1, run="a")
    timing.begin(0)
    scores = {"a": float("nan"), "b": float("inf"), "c": 0.5}
    best = BestValidation("c", "min", 1, scores)
    timing.add_scores(1, scores, step=1, has_improved=False, best=best, by_hand={})
    json.loads((tmp_path / FILE_NAME).read_text().splitlines()[1], parse_constant=pytest.fail)
    (line,) = read_timing(tmp_path).scores
    assert [repr(score) for score in line["scores"].values()] == ["nan", "inf", "0.5"]
    found = BestValidation.from_plain(line["best"])
    assert found is not None
    assert [repr(score) for score in found.scores.values()] == ["nan", "inf", "0.5"]
    assert (found.metric, found.mode, found.iteration) == ("c", "min", 1)


@pytest.mark.shows("P42")
def test_a_disk_that_refuses_times_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def refuse(handle: Any, data: Any) -> int:
        if Path(handle.name).name == FILE_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(files, "write", refuse)
    with collect_warnings() as said:
        assert train(tmp_path, SETTING).has_ended
    assert len([text for text in said if FILE_NAME in text]) == 1

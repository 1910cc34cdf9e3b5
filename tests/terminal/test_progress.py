"""The display of progress: bars on a terminal, and lines of the log (H44)."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import helios
from helios.core.loss_means import LossMeans
from helios.core.utils import find_peak_memory
from helios.schedule import Schedule
from helios.state import TrainingUnit
from helios.terminal.progress import Display, NullDisplay, ProgressDisplay, create_display
from helios.terminal.root_logger import (
    RootLogger,
    close_default_loggers,
    create_default_loggers,
    get_root_logger,
)


class Screen(io.StringIO):
    """A stream that is a terminal or not, and knows what a reader sees on it in the end."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def rows(self) -> list[str]:
        """Carry out carriage returns, line feeds and cursor-up sequences."""
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\x1b[A":
                row -= 1
            elif part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            else:
                rows[row] = (
                    rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                )
                column += len(part)
        return [text.rstrip() for text in rows]


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def start(
    display: Display,
    unit: TrainingUnit = TrainingUnit.EPOCH,
    *,
    position: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    places = {"epoch": 0, "done_in_epoch": 0, "num_batches": 10, "steps_done": 0}
    display.start_training(
        Schedule(unit, **{"total_steps": 4, **options}),
        **places | {"step_in_epoch": 0, "find_optimizers": dict} | (position or {}),
    )


def advance(display: Display, time: Time, count: int, seconds: float, loss: float = 0.5) -> None:
    losses = means_of(display)
    for _ in range(count):
        time.now += seconds
        losses.add({"loss": torch.tensor(loss, requires_grad=True)}, 1)
        display.advance(losses, 32, True)


def means_of(display: Display, losses: dict[str, Any] | None = None) -> LossMeans:
    """Return losses for a display, to which those of an iteration were added."""
    means = LossMeans(lambda *_: None)
    means.serve(display.viewers)
    means.add(losses or {}, 1)
    return means


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def terminal() -> Screen:
    return Screen(is_terminal=True)


@pytest.fixture
def pipe() -> Screen:
    return Screen(is_terminal=False)


@pytest.mark.shows("H44", "R42")
def test_epochs_have_two_bars_with_loss_speed_and_time_left(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display)
    advance(display, time, 5, seconds=2.0, loss=0.12341)
    epochs, iterations = terminal.rows()[:2]
    assert re.fullmatch(r"epochs: +0%\|.*\| 0/4, 0:01:10 left", epochs)
    assert re.fullmatch(r"steps: +50%\|.*\| 5/10, loss 0\.1234, 16 samples/s", iterations)
    display.close()
    assert len([row for row in terminal.rows() if row]) == 1, "only the epochs stay to be seen"


@pytest.mark.shows("H44")
def test_a_run_by_steps_has_one_bar_that_counts_them(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, TrainingUnit.ITERATION, total_steps=40)
    for moved in (False, True, False, True):
        time.now += 1.0
        display.advance(means_of(display, {"loss": 2}), 8, moved)
    [row] = [row for row in terminal.rows() if row]
    assert re.fullmatch(r"steps: +5%\|.*\| 2/40, loss 2, 8 samples/s, 0:01:16 left", row)
    display.close()
    assert terminal.rows()[0] == row, "the last state stays to be seen"


@pytest.mark.shows("H44")
def test_an_endless_run_has_a_count_without_a_total(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, TrainingUnit.ITERATION, total_steps=math.inf, position={"steps_done": 7})
    advance(display, time, 1, seconds=1.0)
    assert terminal.rows()[0] == "steps: 8, loss 0.5, 32 samples/s"
    display.close()


@pytest.mark.shows("H14")
def test_a_resumed_run_starts_at_its_position_and_measures_its_own_speed(
    terminal: Screen, time: Time
) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, position={"epoch": 2, "done_in_epoch": 5, "step_in_epoch": 5})
    display.start_epoch(2, 10, 5, 5)
    assert re.fullmatch(r"epochs: +50%\|.*\| 2/4", terminal.rows()[0])
    assert re.fullmatch(r"steps: +50%\|.*\| 5/10", terminal.rows()[1])
    advance(display, time, 5, seconds=1.0)
    assert terminal.rows()[0].endswith("2/4, 0:00:10 left")
    display.close()


def test_bars_are_redrawn_by_time_and_not_by_iteration(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display)
    drawn = terminal.getvalue()
    advance(display, time, 5, seconds=0.019)
    assert terminal.getvalue() == drawn
    advance(display, time, 1, seconds=0.019)
    assert "6/10" in terminal.getvalue()
    display.close()


@pytest.mark.shows("P78")
def test_the_peak_of_memory_is_read_at_each_drawing(terminal: Screen, time: Time) -> None:
    reads: list[dict[str, int]] = []

    def find() -> dict[str, int]:
        reads.append({"memory": 300 << 20} | ({"gpu_memory": 5 << 29} if len(reads) > 1 else {}))
        return reads[-1]

    display = ProgressDisplay(True, terminal, time, find_memory=find)
    start(display)
    advance(display, time, 5, seconds=1.0)
    assert terminal.rows()[1].endswith(" 5/10, loss 0.5, 32 samples/s, GPU peak 2.5 GiB")
    count = len(reads)
    advance(display, time, 5, seconds=0.0)
    assert len(reads) == count, "not in each iteration"
    display.close()


def test_without_a_gpu_the_peak_is_that_of_the_process(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time, find_memory=lambda: {"vm_hwm": 300 << 20})
    start(display)
    advance(display, time, 1, seconds=31.0)
    assert terminal.rows()[1].endswith(", peak 300 MiB")
    display.close()
    assert set(find_peak_memory()) <= {"vm_hwm", "memory", "gpu_memory"}


def test_losses_are_read_only_for_a_drawing_and_not_after_an_error(
    terminal: Screen, time: Time
) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display)
    # Reading one of the meta device is an error.
    losses = means_of(display, {"loss": torch.empty((), device="meta")})
    display.advance(losses, 1, True)
    time.now += 1.0
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        display.advance(losses, 1, True)
    display.close()
    assert re.fullmatch(r"epochs: +0%\|.*\| 0/4, 0:00:19 left", terminal.rows()[0])


def test_what_is_no_number_is_left_out_of_the_losses(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, TrainingUnit.ITERATION)
    time.now += 1.0
    losses = {"pair": torch.ones(2), "name": "a", "one": torch.ones(1), "count": 3}
    display.advance(means_of(display, losses), 1, True)
    assert ", one 1, count 3, 1 samples/s" in terminal.rows()[0]
    display.close()


@pytest.mark.shows("H44")
def test_a_validation_has_a_bar_that_goes_away_and_its_time_is_no_training_time(
    terminal: Screen, time: Time
) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display)
    advance(display, time, 10, seconds=1.0)
    display.end_epoch()
    display.start_evaluation("validation", 4)
    for _ in range(3):
        time.now += 100.0
        display.advance_evaluation()
    epochs, iterations, validation = terminal.rows()[:3]
    assert re.fullmatch(r"epochs: +25%\|.*\| 1/4, 0:15:30 left", epochs)
    assert re.fullmatch(r"steps: +100%\|.*\| 10/10, loss 0\.5, 32 samples/s", iterations)
    assert re.fullmatch(r"validation: +75%\|.*\| 3/4", validation)
    display.end_evaluation()
    display.start_epoch(1, 10, 0)
    advance(display, time, 1, seconds=1.0)
    assert terminal.rows()[1].endswith("1/10, loss 0.5, 32 samples/s")
    assert [row for row in terminal.rows()[2:] if row] == []
    display.close()


def test_a_test_alone_has_one_bar_that_stays(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    display.end_evaluation()
    display.start_evaluation("testing", 3)
    for _ in range(3):
        display.advance_evaluation()
    display.end_evaluation()
    display.close()
    assert [row for row in terminal.rows() if row] == [terminal.rows()[0]]
    assert re.fullmatch(r"testing: 100%\|.*\| 3/3", terminal.rows()[0])


def test_a_line_of_the_log_stands_above_the_bars(
    terminal: Screen, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    root = RootLogger(capture_warnings=False)
    display = ProgressDisplay(True, terminal, time)
    try:
        start(display)
        advance(display, time, 5, seconds=1.0)
        root.warning("something happened")
        advance(display, time, 1, seconds=1.0)
        first, epochs, iterations = terminal.rows()[:3]
        assert first.endswith("WARNING - something happened")
        assert re.fullmatch(r"epochs: .*\| 0/4, .* left", epochs)
        assert re.fullmatch(r"steps: .*\| 6/10, .* samples/s", iterations)
        assert capsys.readouterr().err == ""
        display.close()
        root.warning("after the bars")
        assert capsys.readouterr().err.endswith("after the bars\n")
    finally:
        display.close()
        root.close()


@pytest.mark.shows("P133")
def test_bars_of_epochs_count_the_steps_of_windows(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, accumulation_steps=4)
    for number in range(1, 11):
        time.now += 1.0
        display.advance(means_of(display), 8, number % 4 == 0 or number == 10)
        done = -(-number // 4) if number == 10 else number // 4
        assert f" {done}/3, 8 samples/s" in terminal.rows()[1]
    display.close()


# The first one waits for a step whose rates are watched.
LINE = (
    "step 3/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:12:20",
    "step 5/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:11:40",
    "step 7/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:11:00",
    "step 9/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:10:20",
)


@pytest.mark.shows("P133")
@pytest.mark.parametrize("has_bars", [False, True])
def test_without_a_bar_the_log_has_a_line_every_30_seconds(
    has_bars: bool, pipe: Screen, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    display = ProgressDisplay(has_bars, pipe, time)
    start(display)
    advance(display, time, 9, seconds=20.0, loss=0.12341)
    display.close()
    assert tuple(caplog.messages) == LINE
    assert pipe.getvalue() == ""


@pytest.mark.shows("P133")
def test_a_frequency_decides_in_place_of_the_time(
    pipe: Screen, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    display = ProgressDisplay(False, pipe, time)
    start(display, TrainingUnit.ITERATION, total_steps=math.inf, print_frequency=3)
    for number in range(1, 7):
        time.now += 40.0
        logged = None if number % 3 else {"loss": 1 / number}
        display.advance(means_of(display), 1, True, logged=logged)
    display.close()
    assert caplog.messages == [
        "step 3  epoch 1  loss 0.3333  0.025 steps/s",
        "step 6  epoch 1  loss 0.1667  0.025 steps/s",
    ]


@pytest.mark.shows("P133")
def test_beside_a_bar_the_log_file_has_the_lines_and_the_screen_has_not(
    terminal: Screen, time: Time, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_default_loggers(enable_tensorboard=False, capture_warnings=False)
    try:
        get_root_logger().setup(tmp_path / "run.log")
        display = ProgressDisplay(True, terminal, time)
        start(display)
        advance(display, time, 9, seconds=20.0, loss=0.12341)
        display.close()
    finally:
        close_default_loggers()
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert tuple(line.rpartition(" - ")[2] for line in lines) == LINE
    assert "epoch 1" not in terminal.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.shows("P133")
def test_a_long_evaluation_has_lines_too_and_its_time_is_not_that_of_steps(
    pipe: Screen, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    display = ProgressDisplay(False, pipe, time)
    start(display, TrainingUnit.ITERATION, total_steps=8, print_frequency=3)
    for number in range(1, 3):
        display.start_evaluation("validation", 4)
        for _ in range(4):
            time.now += 20.0
            display.advance_evaluation()
        display.end_evaluation()
        time.now += 2.0
        display.advance(means_of(display), 1, True, logged={})
        assert caplog.messages[-1].startswith(f"step {number}/8  epoch 1  0.5 steps/s  eta ")
    display.close()
    assert caplog.messages[:2] == ["validation  batch 2/4", "validation  batch 4/4"]
    assert len(caplog.messages) == 6


def test_a_length_that_is_not_known_has_no_total(
    pipe: Screen, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    display = ProgressDisplay(False, pipe, time)
    start(display, total_steps=2, position={"num_batches": None})
    advance(display, time, 4, seconds=10.0)
    display.close()
    assert caplog.messages == ["step 4  epoch 1  loss 0.5  0.1 steps/s"]


class Decay(helios.Model):
    """Two groups, the rate of one of which a scheduler halves after each step."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": 0.1}]
        self.optimizer = torch.optim.SGD(groups, lr=8.2e-4)
        rules = [lambda step: 0.5**step, lambda step: 1.0]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rules)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        return self.net(batch).square().mean() * 0 + batch.mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        samples = torch.arange(12.0).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=1, shuffle=False)
        self._train_dataset = self._create_dataset(samples, params)


@pytest.mark.shows("P133")
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_run_logs_steps_epochs_and_the_rates_that_the_steps_have_used(
    unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = helios.Trainer(
        train_unit=unit,
        total_steps=2 if unit == "epoch" else 6,
        accumulation_steps=4,
        print_frequency=4 if unit == "epoch" else 1,
        use_cpu=True,
        print_banner=False,
    )
    trainer.fit(Decay("decay"), Data())
    lines = [text for text in caplog.messages if text.startswith("step ")]
    parts = [line.split("  ") for line in lines]
    assert [part[:2] for part in parts] == [
        [f"step {step}/6", f"epoch {1 + (step - 1) // 3}"] for step in range(1, 7)
    ]
    halves = ["8.2e-4", "4.1e-4", "2.05e-4", "1.025e-4", "5.125e-5", "2.562e-5"]
    assert [part[3] for part in parts] == [f"lr {rate}/0.1" for rate in halves]


@pytest.mark.shows("P133")
@pytest.mark.parametrize(("seconds", "accumulation"), [(1.0, 1), (20.0, 1), (1.0, 7), (20.0, 7)])
def test_a_line_by_time_has_the_rate_that_the_last_step_has_used(
    seconds: float, accumulation: int, pipe: Screen, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    display = ProgressDisplay(False, pipe, time)
    start(
        display,
        TrainingUnit.ITERATION,
        total_steps=math.inf,
        accumulation_steps=accumulation,
        position={"find_optimizers": lambda: {"optimizer": optimizer}},
    )
    for number in range(1, 141):
        time.now += seconds
        has_stepped = number % accumulation == 0
        if has_stepped:
            optimizer.param_groups[0]["lr"] = float(number // accumulation)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.0
        display.advance(means_of(display), 1, has_stepped)
    display.close()
    lines = [text.split("  ") for text in caplog.messages]
    steps = [int(line[0].removeprefix("step ")) for line in lines]
    assert len(lines) >= 3
    # Before the first step, it is the rate of that one.
    assert [line[2] for line in lines] == [f"lr {max(1, step)}" for step in steps]


def test_a_display_is_closed_once_and_can_be_used_again(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    for _ in range(2):
        start(display)
        advance(display, time, 1, seconds=1.0)
        display.close()
        display.close()
    display.advance(means_of(display), 1, True)
    assert sum("epochs" in row for row in terminal.rows()) == 2


@pytest.mark.shows("H44")
def test_nothing_is_drawn_when_off(capsys: pytest.CaptureFixture[str], time: Time) -> None:
    display = create_display(False, clock=time)
    start(display)
    display.start_epoch(0, 10, 0)
    advance(display, time, 2, seconds=1.0)
    display.end_epoch()
    display.start_evaluation("validation", 1)
    display.advance_evaluation()
    display.end_evaluation()
    display.close()
    assert capsys.readouterr().err == ""


@pytest.mark.shows("H44")
def test_only_rank_0_shows_anything() -> None:
    assert isinstance(create_display(True), ProgressDisplay)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert isinstance(create_display(True), NullDisplay)
        assert isinstance(create_display(False), NullDisplay)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.shows("U26")
@pytest.mark.parametrize("unit", TrainingUnit)
def test_scores_stay_in_the_bar(unit: TrainingUnit, terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, unit)
    display.note_scores("error 0.25 (best)")
    advance(display, time, 1, seconds=60.0)
    row = next(row for row in terminal.rows() if " left" in row)
    assert row.endswith(" left, error 0.25 (best)")
    display.close()

"""The display of progress: on a terminal, elsewhere, and off (H44)."""

from __future__ import annotations

import io
import math
import re

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from helios.core.text import find_peak_memory
from helios.state import TrainingUnit
from helios.terminal.progress import BarDisplay, Display, NullDisplay, create_display
from helios.terminal.root_logger import RootLogger


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


def start(display: Display, unit: TrainingUnit = TrainingUnit.EPOCH, **changes: float) -> None:
    position = {"total_steps": 4, "epoch": 0, "done_in_epoch": 0, "steps_done": 0} | changes
    display.start_training(unit=unit, num_batches=10, **position)  # type: ignore[arg-type]


def advance(display: Display, time: Time, count: int, seconds: float, loss: float = 0.5) -> None:
    for _ in range(count):
        time.now += seconds
        display.advance({"loss": torch.tensor(loss, requires_grad=True)}, 32, True)


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
    display = BarDisplay(terminal, time)
    start(display)
    advance(display, time, 5, seconds=2.0, loss=0.12341)
    epochs, iterations = terminal.rows()[:2]
    assert re.fullmatch(r"epochs: +0%\|.*\| 0/4, 1:10 left", epochs)
    assert re.fullmatch(r"iterations: +50%\|.*\| 5/10, loss 0\.1234, 16 samples/s", iterations)
    display.close()
    assert len([row for row in terminal.rows() if row]) == 1, "only the epochs stay to be seen"


@pytest.mark.shows("H44")
def test_iterations_have_one_bar_that_counts_steps(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
    start(display, TrainingUnit.ITERATION, total_steps=40)
    for moved in (False, True, False, True):
        time.now += 1.0
        display.advance({"loss": 2}, 8, moved)
    [row] = [row for row in terminal.rows() if row]
    assert re.fullmatch(r"iterations: +5%\|.*\| 2/40, loss 2, 8 samples/s, 1:16 left", row)
    display.close()
    assert terminal.rows()[0] == row, "the last state stays to be seen"


@pytest.mark.shows("H44")
def test_an_endless_run_has_a_count_without_a_total(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
    start(display, TrainingUnit.ITERATION, total_steps=math.inf, steps_done=7)
    advance(display, time, 1, seconds=1.0)
    assert terminal.rows()[0] == "iterations: 8, loss 0.5, 32 samples/s"
    display.close()


@pytest.mark.shows("H14")
def test_a_resumed_run_starts_at_its_position_and_measures_its_own_speed(
    terminal: Screen, time: Time
) -> None:
    display = BarDisplay(terminal, time)
    start(display, epoch=2, done_in_epoch=5)
    display.start_epoch(2, 10, 5)
    assert re.fullmatch(r"epochs: +50%\|.*\| 2/4", terminal.rows()[0])
    assert re.fullmatch(r"iterations: +50%\|.*\| 5/10", terminal.rows()[1])
    advance(display, time, 5, seconds=1.0)
    assert terminal.rows()[0].endswith("2/4, 0:10 left")
    display.close()


def test_bars_are_redrawn_by_time_and_not_by_iteration(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
    start(display)
    drawn = terminal.getvalue()
    advance(display, time, 5, seconds=0.019)
    assert terminal.getvalue() == drawn
    advance(display, time, 1, seconds=0.019)
    assert "6/10" in terminal.getvalue()
    display.close()


class _Unread(dict[str, object]):
    def items(self) -> object:  # type: ignore[override]
        raise RuntimeError("the losses were read")


@pytest.mark.shows("P78")
def test_the_peak_of_memory_is_read_at_each_drawing(terminal: Screen, time: Time) -> None:
    reads: list[dict[str, int]] = []

    def find() -> dict[str, int]:
        reads.append({"memory": 300 << 20} | ({"gpu_memory": 5 << 29} if len(reads) > 1 else {}))
        return reads[-1]

    display = BarDisplay(terminal, time, find_memory=find)
    start(display)
    advance(display, time, 5, seconds=1.0)
    assert terminal.rows()[1].endswith(" 5/10, loss 0.5, 32 samples/s, GPU peak 2.5 GiB")
    count = len(reads)
    advance(display, time, 5, seconds=0.0)
    assert len(reads) == count, "not in each iteration"
    display.close()


def test_without_a_gpu_the_peak_is_that_of_the_process(pipe: Screen, time: Time) -> None:
    display = BarDisplay(pipe, time, find_memory=lambda: {"vm_hwm": 300 << 20})
    start(display)
    advance(display, time, 1, seconds=31.0)
    assert ", peak 300 MiB, " in pipe.getvalue()
    assert set(find_peak_memory()) <= {"vm_hwm", "memory", "gpu_memory"}


def test_losses_are_read_only_for_a_drawing_and_not_after_an_error(
    terminal: Screen, time: Time
) -> None:
    display = BarDisplay(terminal, time)
    start(display)
    display.advance(_Unread(), 1, True)
    time.now += 1.0
    with pytest.raises(RuntimeError, match="were read"):
        display.advance(_Unread(), 1, True)
    display.close()
    assert re.fullmatch(r"epochs: +0%\|.*\| 0/4, 0:19 left", terminal.rows()[0])


def test_what_is_no_number_is_left_out_of_the_losses(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
    start(display, TrainingUnit.ITERATION)
    time.now += 1.0
    losses = {"pair": torch.ones(2), "name": "a", "one": torch.ones(1), "count": 3}
    display.advance(losses, 1, True)
    assert ", one 1, count 3, 1 samples/s" in terminal.rows()[0]
    display.close()


@pytest.mark.shows("H44")
def test_a_validation_has_a_bar_that_goes_away_and_its_time_is_no_training_time(
    terminal: Screen, time: Time
) -> None:
    display = BarDisplay(terminal, time)
    start(display)
    advance(display, time, 10, seconds=1.0)
    display.end_epoch()
    display.start_evaluation("validation", 4)
    for _ in range(3):
        time.now += 100.0
        display.advance_evaluation()
    epochs, iterations, validation = terminal.rows()[:3]
    assert re.fullmatch(r"epochs: +25%\|.*\| 1/4, 15:30 left", epochs)
    assert re.fullmatch(r"iterations: +100%\|.*\| 10/10, loss 0\.5, 32 samples/s", iterations)
    assert re.fullmatch(r"validation: +75%\|.*\| 3/4", validation)
    display.end_evaluation()
    display.start_epoch(1, 10, 0)
    advance(display, time, 1, seconds=1.0)
    assert terminal.rows()[1].endswith("1/10, loss 0.5, 32 samples/s")
    assert [row for row in terminal.rows()[2:] if row] == []
    display.close()


def test_a_test_alone_has_one_bar_that_stays(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
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
    display = BarDisplay(terminal, time)
    try:
        start(display)
        advance(display, time, 5, seconds=1.0)
        root.warning("something happened")
        advance(display, time, 1, seconds=1.0)
        first, epochs, iterations = terminal.rows()[:3]
        assert first.endswith("WARNING - something happened")
        assert re.fullmatch(r"epochs: .*\| 0/4, .* left", epochs)
        assert re.fullmatch(r"iterations: .*\| 6/10, .* samples/s", iterations)
        assert capsys.readouterr().err == ""
        display.close()
        root.warning("after the bars")
        assert capsys.readouterr().err.endswith("after the bars\n")
    finally:
        display.close()
        root.close()


def test_without_a_terminal_there_is_a_plain_line_now_and_then(pipe: Screen, time: Time) -> None:
    display = BarDisplay(pipe, time)
    start(display)
    advance(display, time, 9, seconds=20.0, loss=0.12341)
    assert pipe.getvalue().splitlines() == [
        "epochs 0/4, iterations 2/10, loss 0.1234, 1.6 samples/s, 12:40 left",
        "epochs 0/4, iterations 4/10, loss 0.1234, 1.6 samples/s, 12:00 left",
        "epochs 0/4, iterations 6/10, loss 0.1234, 1.6 samples/s, 11:20 left",
        "epochs 0/4, iterations 8/10, loss 0.1234, 1.6 samples/s, 10:40 left",
    ]
    display.close()
    assert "9/10" in pipe.getvalue().splitlines()[-1]


def test_without_a_terminal_each_epoch_ends_with_a_line(pipe: Screen, time: Time) -> None:
    display = BarDisplay(pipe, time)
    start(display, total_steps=2)
    for epoch in range(2):
        display.start_epoch(epoch, 10, 0)
        advance(display, time, 10, seconds=0.1, loss=1.0 / (epoch + 1))
        display.end_epoch()
    display.close()
    assert pipe.getvalue().splitlines() == [
        "epochs 1/2, iterations 10/10, loss 1, 320 samples/s, 0:01 left",
        "epochs 2/2, iterations 10/10, loss 0.5, 320 samples/s, 0:00 left",
    ]


def test_without_a_terminal_short_epochs_of_an_iteration_run_say_nothing(
    pipe: Screen, time: Time
) -> None:
    display = BarDisplay(pipe, time)
    start(display, TrainingUnit.ITERATION, total_steps=20)
    for epoch in range(2):
        display.start_epoch(epoch, 10, 0)
        advance(display, time, 10, seconds=0.1)
        display.end_epoch()
    assert pipe.getvalue() == ""
    display.close()
    assert pipe.getvalue() == "iterations 20/20, loss 0.5, 320 samples/s, 0:00 left\n"


def test_a_reader_that_went_away_does_not_end_the_training(time: Time) -> None:
    pipe = Screen(is_terminal=False)
    display = BarDisplay(pipe, time)
    start(display)
    pipe.close()
    advance(display, time, 10, seconds=20.0)
    display.close()


def test_a_length_that_is_not_known_has_no_total(pipe: Screen, time: Time) -> None:
    display = BarDisplay(pipe, time)
    display.start_training(
        unit=TrainingUnit.EPOCH,
        total_steps=2,
        epoch=0,
        done_in_epoch=0,
        num_batches=None,
        steps_done=0,
    )
    advance(display, time, 3, seconds=1.0)
    display.end_epoch()
    display.close()
    assert pipe.getvalue() == "epochs 1/2, iterations 3, loss 0.5, 32 samples/s, 0:03 left\n"


def test_a_display_is_closed_once_and_can_be_used_again(terminal: Screen, time: Time) -> None:
    display = BarDisplay(terminal, time)
    for _ in range(2):
        start(display)
        advance(display, time, 1, seconds=1.0)
        display.close()
        display.close()
    display.advance({}, 1, True)
    assert sum("epochs" in row for row in terminal.rows()) == 2


@pytest.mark.shows("H44")
def test_nothing_is_shown_when_off(capsys: pytest.CaptureFixture[str], time: Time) -> None:
    display = create_display(False)
    start(display)
    display.start_epoch(0, 10, 0)
    advance(display, time, 2, seconds=100.0)
    display.end_epoch()
    display.start_evaluation("validation", 1)
    display.advance_evaluation()
    display.end_evaluation()
    display.close()
    assert isinstance(display, NullDisplay)
    assert capsys.readouterr().err == ""


@pytest.mark.shows("H44")
def test_only_rank_0_shows_anything() -> None:
    assert isinstance(create_display(True), BarDisplay)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert isinstance(create_display(True), NullDisplay)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.shows("U26")
@pytest.mark.parametrize("unit", TrainingUnit)
def test_scores_stay_in_the_bar_and_are_not_repeated_in_lines(
    unit: TrainingUnit, terminal: Screen, pipe: Screen, time: Time
) -> None:
    for screen in (terminal, pipe):
        display = BarDisplay(screen, time)
        start(display, unit)
        display.note_scores("error 0.25 (best)")
        advance(display, time, 1, seconds=60.0)
        row = next(row for row in screen.rows() if " left" in row)
        assert row.endswith(" left, error 0.25 (best)") is (screen is terminal)
        display.close()

"""The display of progress: bars on a terminal, and lines of the log."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch

import helios
from helios.core.loss_means import LossMeans
from helios.listeners import Iteration
from helios.schedule import Schedule
from helios.state import TrainingState, TrainingUnit
from helios.terminal.progress import Display, ProgressDisplay


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
    display: Display, unit: TrainingUnit = TrainingUnit.EPOCH, *, done: int = 0, **options: Any
) -> None:
    """Start a run of 4 epochs of 10 batches, of which some epochs are done."""
    schedule = Schedule(unit, **{"total_steps": 4, **options})
    display.training_started(schedule, epoch=done, steps_done=10 * done, find_optimizers=dict)
    display.epoch_opened(done, 10, 0)


def advance(display: Display, time: Time, count: int, seconds: float, loss: float = 0.5) -> None:
    losses = means_of(display)
    for _ in range(count):
        time.now += seconds
        table = {"loss": torch.tensor(loss, requires_grad=True)}
        losses.iteration_ended(Iteration(TrainingState(global_iteration=1), losses, table))
        end_iteration(display, losses)


def end_iteration(
    display: Display, losses: LossMeans, *, has_stepped: bool = True, logged: Any = None
) -> None:
    """Notify a display of an iteration."""
    state = TrainingState(is_step_boundary=has_stepped)
    display.iteration_ended(Iteration(state, losses, logged=logged))


def means_of(display: Display, losses: dict[str, Any] | None = None) -> LossMeans:
    """Return losses for a display, to which those of an iteration were added."""
    means = LossMeans()
    means.serve(display.viewers)
    means.iteration_ended(Iteration(TrainingState(global_iteration=1), means, losses or {}))
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


@pytest.mark.shows("H44", "P78")
def test_epochs_have_two_bars_and_an_evaluation_one_that_goes_away(
    terminal: Screen, time: Time
) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, done=2)
    advance(display, time, 5, seconds=2.0, loss=0.12341)
    epochs, steps = terminal.rows()[:2]
    assert re.match(r"epochs: +50%\|.*\| 2/4 ", epochs)
    assert re.match(r"steps: +50%\|.*\| 5/10 .*, loss 0\.1234, .*[MG]iB", steps)
    advance(display, time, 5, seconds=2.0)
    display.epoch_ended()
    display.evaluated("validation", 0, 4)
    assert re.match(r"validation: +0%\|.*\| 0/4 ", terminal.rows()[2])
    display.evaluated("validation", 1, 4)
    display.paused()
    display.epoch_opened(3, 10, 0)
    assert not any("validation" in row for row in terminal.rows())
    display.close()
    [row] = [row for row in terminal.rows() if row]
    assert re.match(r"epochs: +75%\|.*\| 3/4 ", row), "only the epochs stay to be seen"


@pytest.mark.shows("H44")
def test_a_run_by_steps_has_one_bar_that_counts_them(terminal: Screen, time: Time) -> None:
    display = ProgressDisplay(True, terminal, time)
    start(display, TrainingUnit.ITERATION, total_steps=40)
    for moved in (False, True, False, True):
        time.now += 1.0
        end_iteration(display, means_of(display, {"loss": 2}), has_stepped=moved)
    [row] = [row for row in terminal.rows() if row]
    assert re.match(r"steps: +5%\|.*\| 2/40 .*, loss 2, ", row)
    display.close()
    assert terminal.rows()[0].startswith("steps:   5%"), "the last state stays to be seen"


LINE = (
    "step 2/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:12:40",
    "step 4/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:12:00",
    "step 6/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:11:20",
    "step 8/40  epoch 1  loss 0.1234  0.05 steps/s  eta 0:10:40",
)


@pytest.mark.shows("H44", "P133")
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


class Decay(helios.Model):
    """Two groups, whose rates a scheduler halves after each step; one is a tensor."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": torch.ones(())}]
        self.optimizer = torch.optim.SGD(groups, lr=8.2e-4)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        return self.net(batch).square().mean() * 0 + batch.mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        samples = torch.arange(12.0).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=1, shuffle=False)
        self._train_dataset = self._create_dataset(samples, params)


@pytest.mark.shows("P133")
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_run_logs_steps_epochs_and_the_rates_that_steps_have_used(
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
    assert [part[3] for part in parts] == [
        *("lr 8.2e-4/1", "lr 4.1e-4/0.5", "lr 2.05e-4/0.25"),
        *("lr 1.025e-4/0.125", "lr 5.125e-5/0.0625", "lr 2.562e-5/0.03125"),
    ]

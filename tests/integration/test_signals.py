"""Real signals to a training in a child process, at named moments; then the same command again."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - optimizers import it: once here, not in every child

import helios
from helios import Signals
from tests.support.elastic import Bits, Elastic, assert_same, read_bits
from tests.support.quiet import Quiet
from tests.support.signals import SignalAt, newest, train_alone, undisturbed

# Nothing but a signal saves, so what a run leaves is what it was asked for.
SETTINGS = {
    "steps": Elastic(num_replicas=1, chkpt_frequency=1000, total_steps=20, length=11),
    "steps of two batches": Elastic(
        num_replicas=1, chkpt_frequency=1000, total_steps=10, length=11, accumulation=2
    ),
    "epochs": Elastic(num_replicas=1, chkpt_frequency=1000, total_steps=4, length=11, unit="epoch"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bits]:
    """The bits of each training without a signal."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: undisturbed(folder / name, setting) for name, setting in SETTINGS.items()}


@pytest.mark.shows("K42", "S12", "S13", "S36", "U3")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "event", "iteration", "saved"),
    [
        ("steps", "on_forward_end", 4, (1, 4)),
        ("steps", "on_validation_batch_start", 5, (1, 5)),
        ("steps", "on_training_epoch_start", 6, (2, 7)),
        ("steps of two batches", "on_backward_end", 3, (1, 4)),
        ("steps of two batches", "on_training_epoch_end", 6, (2, 8)),
        ("epochs", "on_forward_end", 6, (1, 6)),
        ("epochs", "on_validation_batch_start", 6, (1, 6)),
        ("epochs", "on_training_epoch_end", 6, (1, 6)),
    ],
)
def test_a_signal_saves_at_the_next_safe_point_and_costs_no_bit(
    name: str,
    event: str,
    iteration: int,
    saved: tuple[int, int],
    whole: dict[str, Bits],
    tmp_path: Path,
) -> None:
    setting = SETTINGS[name]
    assert train_alone(tmp_path, setting, SignalAt(event, iteration)) == 75
    assert newest(tmp_path) == saved
    assert train_alone(tmp_path, setting) == 0
    assert_same(read_bits(tmp_path), whole[name])


@pytest.mark.shows("S12", "U3")
@pytest.mark.parametrize("number", Signals().numbers[1:])
def test_each_of_the_four_signals_saves(number: int, tmp_path: Path) -> None:
    assert train_alone(tmp_path, SETTINGS["steps"], SignalAt("on_forward_end", 3, (number,))) == 75
    assert newest(tmp_path) == (1, 3)


@pytest.mark.shows("S13")
@pytest.mark.parametrize("event", ["setup", "on_training_start"])
def test_before_the_first_step_nothing_is_saved(
    event: str, whole: dict[str, Bits], tmp_path: Path
) -> None:
    setting = SETTINGS["steps"]
    assert train_alone(tmp_path, setting, SignalAt(event)) == 143
    assert newest(tmp_path) == (0, 0)
    assert not list(tmp_path.glob("turns-*"))
    assert train_alone(tmp_path, setting) == 0
    assert_same(read_bits(tmp_path), whole["steps"])


@pytest.mark.shows("S15", "U3")
def test_workers_do_not_mind_what_is_sent_to_all_processes_of_a_job(tmp_path: Path) -> None:
    class SignalAll(SignalAt):
        def _send(self) -> None:
            os.killpg(os.getpid(), signal.SIGTERM)

        def setup(self) -> None:
            super().setup()
            os.setpgid(0, 0)

    # A window of a whole epoch, whose last batches are fetched behind the signal.
    setting = dataclasses.replace(SETTINGS["steps"], accumulation=12, length=23, total_steps=2)
    whole = undisturbed(tmp_path / "whole", setting)
    setting = dataclasses.replace(setting, num_workers=1)
    folder = tmp_path / "run"
    assert train_alone(folder, setting, SignalAll("on_forward_end", 2)) == 75
    assert newest(folder) == (1, 12)
    assert train_alone(folder, setting) == 0
    assert_same(read_bits(folder), whole)


class PressTwice(Quiet):
    """Sends SIGINT, and again when the first is no longer to be taken for its echo."""

    def __init__(self, marker: Path) -> None:
        super().__init__("press-twice")
        self.marker = marker

    def on_forward_end(self, context: Any) -> None:
        if self.context.state.global_iteration == 4:
            from helios.core import signal_watch

            signal_watch.ECHO_SECONDS = 0.05
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.2)
            os.kill(os.getpid(), signal.SIGINT)
            # What it interrupts is a wait, as most often.
            signal.sigtimedwait([], 30)

    def on_exception(self, exception: BaseException) -> None:
        self.marker.write_text(type(exception).__name__)


@pytest.mark.shows("S14")
def test_a_second_ctrl_c_ends_the_training_without_saving(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def train() -> int:
        from tests.support.elastic import train

        trainer: list[helios.Trainer] = []
        plugin = PressTwice(marker)
        try:
            train(tmp_path / "run", SETTINGS["steps"], plugin, nproc=1)
        except KeyboardInterrupt:
            trainer.append(plugin.trainer)
        return trainer[0].exit_code

    from tests.support.signals import run_forked

    assert run_forked(train) == 130
    assert marker.read_text() == "KeyboardInterrupt"
    assert newest(tmp_path / "run") == (0, 0)


@pytest.mark.shows("S14")
def test_who_comes_to_no_safe_point_in_time_is_ended_without_saving(
    whole: dict[str, Bits], tmp_path: Path
) -> None:
    """Also where the main thread waits in C, and runs no handler."""
    setting, signals = SETTINGS["steps"], Signals(grace=0.3)
    plugin = SignalAt("on_forward_end", 4, does_stick=True)
    assert train_alone(tmp_path, setting, plugin, signals=signals) == 143
    assert newest(tmp_path) == (0, 0)
    assert train_alone(tmp_path, setting, SignalAt("on_forward_end", 3)) == 75
    assert train_alone(tmp_path, setting, plugin, signals=signals) == 75
    assert train_alone(tmp_path, setting) == 0
    assert_same(read_bits(tmp_path), whole["steps"])

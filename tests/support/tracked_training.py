"""Trainings with a tracker, which log at every step, to be killed while they send."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from helios.plugins import Plugin, Tracker
from helios.state import TrainingState
from tests.support.runs import Setting, train

SECONDS = 300.0


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Pace(Plugin):
    """Takes its time, so that kills meet a sender at work; logs a picture now and then."""

    def __init__(self, seconds: float) -> None:
        super().__init__("pace")
        self.seconds = seconds
        self.tracker: Any = None

    unsaved = ("tracker",)

    def setup(self) -> None:
        self.tracker = self.trainer.plugins["tracker"]

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        threading.Event().wait(self.seconds)
        if state.global_iteration % 10 == 0:
            shade = np.full((1, 4, 4), state.global_iteration / 2000)
            self.tracker.add_image("shade", shade)


def train_tracked(folder: Path, target: Any, steps: int, seconds: float, **options: Any) -> None:
    """Train, and take so many seconds for a step."""
    setting = Setting(total_steps=steps, chkpt_frequency=7, print_frequency=1)
    tracker = Tracker(folder / "tracker", target, params={"lr": 0.05}, patience=SECONDS, **options)
    train(folder, setting, tracker, Pace(seconds))


def start_tracked(folder: Path, target: Any, steps: int, seconds: float) -> BaseProcess:
    """Train in a process of its own."""
    context = multiprocessing.get_context("fork")
    training = context.Process(target=train_tracked, args=(folder, target, steps, seconds))
    training.start()
    return training


def end_tracked(training: BaseProcess) -> int | None:
    """Wait for the end of a process, and return its exit code."""
    training.join()
    code = training.exitcode
    training.close()
    return code

"""The time limit: how it is given, and that the same command continues after it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.plugins.time_limit import TimeLimit, parse_duration
from tests.support.quiet import Quiet
from tests.support.runs import RETURNS, IndexModule, Setting, SmallModel

_NEVER = 10**9


class Ticker(Quiet):
    """A clock that goes on by a second in every batch."""

    unsaved = ("now",)

    def __init__(self) -> None:
        super().__init__("ticker")
        self.now = 0.0

    def on_training_batch_start(self, *args: Any) -> None:
        self.now += 1.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        ("00:01:30", 90.0),
        ("1:00:00", 3600.0),
        ("2-03:04:05", 183845.0),
        (timedelta(days=1, milliseconds=500), 86400.5),
    ],
)
def test_a_duration_is_read_as_slurm_writes_it(value: Any, seconds: float) -> None:
    assert parse_duration("it", value) == seconds


@pytest.mark.shows("K42")
def test_the_same_command_goes_on_after_an_interruption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start() -> tuple[bool, int]:
        clock = Ticker()
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=5,
            chkpt_root=tmp_path,
            chkpt_frequency=_NEVER,
            use_cpu=True,
            print_banner=False,
            plugins=[clock, TimeLimit("00:00:03", clock=clock)],
            signals=RETURNS,
        )
        result = trainer.fit(SmallModel(Setting()), IndexModule(Setting()))
        return result, trainer.exit_code

    assert start() == (False, 75)
    said = capfd.readouterr().err
    assert "interrupted: the time limit of 0:00:03 is reached" in said
    assert "to resume from small_epoch_1_iter_3.pth" in said
    assert start() == (True, 0)
    assert start() == (True, 0)
    assert "Nothing to do" in capfd.readouterr().err

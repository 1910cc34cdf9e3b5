"""The time limit, and with it every interruption: what is left off anywhere gives the same bits."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import Plugin
from helios.plugins.time_limit import TimeLimit, parse_duration
from tests.support.quiet import Quiet
from tests.support.runs import RETURNS, IndexModule, Outcome, Setting, SmallModel, train

_SETTINGS = {
    "steps": Setting(total_steps=14),
    "accumulated steps": Setting(total_steps=5, accumulation=4, valid_frequency=2),
    "manual steps": Setting(total_steps=5, accumulation=2, is_manual=True, scheduler="none"),
    "epochs": Setting(unit="epoch", total_steps=3, valid_frequency=1),
    "accumulated epochs": Setting(unit="epoch", total_steps=3, accumulation=4, valid_frequency=1),
    "manual epochs": Setting(unit="epoch", total_steps=2, is_manual=True, valid_frequency=2),
    "workers": Setting(total_steps=8, num_workers=2),
}
_NEVER = 10**9


class Ticker(Quiet):
    """A clock that goes on by a second in every event of a kind."""

    unsaved = ("now",)

    def __init__(self, event: str = "on_training_batch_start", now: float = 0.0) -> None:
        super().__init__("ticker")
        self.now = now
        setattr(self, event, self._tick)

    def _tick(self, *args: Any) -> bool:
        self.now += 1.0
        return False

    def __call__(self) -> float:
        return self.now


class Asker(Quiet):
    """Asks for something at the n-th time that it hears an event."""

    unsaved = ("left",)

    def __init__(self, event: str, number: int, *verbs: str) -> None:
        super().__init__("asker")
        self.left = number
        self.verbs = verbs or ("interrupt",)
        setattr(self, event, self._act)

    def _act(self, *args: Any) -> bool:
        self.left -= 1
        for verb in self.verbs if self.left == 0 else ():
            getattr(self.context, verb)("asked")
        return False


def _rarely(setting: Setting) -> Setting:
    """Return a setting in which only an interruption and the end write checkpoints."""
    return dataclasses.replace(setting, chkpt_frequency=_NEVER)


def _code(plugin: Plugin) -> int:
    assert plugin.trainer is not None
    return plugin.trainer.exit_code


@functools.cache
def _undisturbed(name: str) -> Outcome:
    """Train a setting without an interruption, once for all tests."""
    setting = dataclasses.replace(_SETTINGS[name], chkpt_frequency=1, requests=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(Path(folder), setting)
    assert outcome.has_ended
    return outcome


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


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"limit": 0}, ArgumentError, "must be positive"),
        ({"limit": "90"}, ArgumentError, "must be of the form"),
        ({"limit": None}, ArgumentTypeError, "must be a duration"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        TimeLimit(**arguments)


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


@pytest.mark.parametrize(
    ("name", "event", "number"),
    [
        ("steps", "on_training_epoch_end", 1),
        ("accumulated steps", "on_training_epoch_end", 1),
        ("accumulated steps", "on_training_batch_end", 5),
    ],
)
def test_a_stop_asked_for_between_safe_points_keeps_what_was_trained(
    name: str, event: str, number: int, tmp_path: Path
) -> None:
    """A regular end has a checkpoint of its own."""
    asker = Asker(event, number, "request_stop")
    outcome = train(tmp_path, _rarely(_SETTINGS[name]), asker)
    assert outcome.has_ended
    (path,) = tmp_path.glob("*/*.pth")
    assert path.stem.endswith(f"iter_{max(outcome.records)}")


@pytest.mark.parametrize("name", ["steps", "epochs"])
@pytest.mark.parametrize("verbs", [("interrupt", "request_stop"), ("request_stop", "interrupt")])
def test_a_regular_end_at_the_same_boundary_wins(
    name: str, verbs: tuple[str, str], tmp_path: Path
) -> None:
    asker = Asker("on_training_batch_end", 5, *verbs)
    outcome = train(tmp_path, _rarely(_SETTINGS[name]), asker)
    assert outcome.has_ended
    assert _code(asker) == 0
    assert len(outcome.records) == 5
    assert not train(tmp_path, _rarely(_SETTINGS[name]), Asker("on_fit_start", _NEVER)).records

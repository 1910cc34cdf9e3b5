"""An interrupted call does not return: what follows it in a script is not run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.plugins import Plugin
from tests.support.runs import IndexModule, Setting, SmallModel
from tests.support.signals import run_forked

INT, TERM = signal.SIGINT, signal.SIGTERM


class Sends(Plugin):
    """Sends a signal in an event, from a number of calls of it on, and logs what it hears."""

    unsaved = ("calls", "heard")

    def __init__(self, event: str, number: int | None = TERM, *, at: int = 3) -> None:
        super().__init__("sends")
        self.number = number
        self.at = at
        self.calls = 0
        self.heard: list[str] = []
        setattr(self, event, self._send)

    def setup(self) -> None:
        self.heard.append("setup")

    def _send(self, *_: Any) -> None:
        self.calls += 1
        if self.number is not None and self.calls == self.at:
            os.kill(os.getpid(), self.number)

    def on_exception(self, exception: BaseException) -> None:
        self.heard.append(type(exception).__name__)

    def on_fit_end(self) -> None:
        self.heard.append("on_fit_end")

    def teardown(self) -> None:
        self.heard.append("teardown")


STEP = "on_training_batch_end"


def make(folder: Path | None, *plugins: Plugin, **options: Any) -> helios.Trainer:
    saves = {} if folder is None else {"chkpt_root": folder, "chkpt_frequency": 100}
    known = {"train_unit": "iteration", "total_steps": 8, "use_cpu": True, "print_banner": False}
    return helios.Trainer(plugins=list(plugins), **{**known, **saves, **options})


def fit(trainer: helios.Trainer, name: str = "small") -> bool:
    return trainer.fit(SmallModel(Setting(), name), IndexModule(Setting()))


def forked(work: Callable[[], Any]) -> int:
    """Run work as a script of its own; returns its exit code, 0 if it comes to its end."""

    def script() -> int:
        work()
        return 0

    return run_forked(script)


@pytest.mark.shows("S12")
def test_it_is_raised_after_the_last_events_and_passes_no_on_exception(tmp_path: Path) -> None:
    def work() -> None:
        plugin = Sends(STEP)
        trainer = make(tmp_path, plugin)
        with pytest.raises(helios.Interrupted) as caught:
            fit(trainer)
        assert plugin.heard == ["setup", "on_fit_end", "teardown"]
        assert caught.value.code == trainer.exit_code == 75
        assert "SIGTERM" in caught.value.reason
        assert signal.getsignal(TERM) is signal.SIG_DFL

    assert forked(work) == 0


def _test(trainer: helios.Trainer) -> object:
    return trainer.test(SmallModel(Setting()), IndexModule(Setting()), checkpoint=None)


def _validate(trainer: helios.Trainer) -> object:
    return trainer.validate(SmallModel(Setting()), IndexModule(Setting()), checkpoint=None)


CALLS = [fit, _test]


@pytest.mark.parametrize("call", CALLS)
def test_after_one_that_was_swallowed_no_call_of_any_trainer_begins(
    call: Callable[[helios.Trainer], object], tmp_path: Path
) -> None:
    def work() -> None:
        with contextlib.suppress(BaseException):
            fit(make(tmp_path, Sends(STEP)))
        plugin = Sends(STEP, None)
        trainer = make(tmp_path / "other", plugin)
        with pytest.raises(helios.Interrupted) as again:
            call(trainer)
        assert (again.value.code, trainer.exit_code, plugin.heard) == (75, 75, [])
        # A process of its own, such as one that trains something else, may.
        child = multiprocessing.get_context("fork").Process(target=fit, args=(make(None),))
        child.start()
        child.join()
        assert child.exitcode == 0

    assert forked(work) == 0
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("call", "event", "number"),
    [(_test, "on_testing_batch_end", INT), (_validate, "on_validation_batch_end", TERM)],
)
def test_an_evaluation_ends_after_its_batch(
    call: Callable[[helios.Trainer], object], event: str, number: int, tmp_path: Path
) -> None:
    def work(folder: Path | None) -> None:
        plugin = Sends(event, number, at=1)
        try:
            call(make(folder, plugin))
        finally:
            assert (plugin.calls, plugin.heard) == (1, ["setup", "teardown"])

    assert forked(lambda: fit(make(tmp_path))) == 0
    assert forked(lambda: work(tmp_path)) == 75
    assert forked(lambda: work(None)) == 128 + number

"""The options for signals, and what fit says and does about them."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

import helios
from helios import Signals
from helios.core.signal_watch import SignalReceiver
from helios.errors import ArgumentError
from tests.support.runs import RETURNS, IndexModule, Setting, SmallModel


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"numbers": signal.SIGTERM}, "a tuple of signals that a process can delay"),
        ({"numbers": ("SIGTERM",)}, "a tuple of signals that a process can delay"),
        ({"numbers": (signal.SIGKILL,)}, "a tuple of signals that a process can delay"),
        ({"grace": 0}, "a positive number"),
        ({"grace": "20"}, "a positive number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^Signals\(\w+=\.\.\.\) must be {rule}"):
        Signals(**options)


def fit_quickly(**options: Any) -> helios.Trainer:
    setting = Setting(total_steps=1, validates=False)
    trainer = helios.Trainer("run", "iteration", 1, use_cpu=True, print_banner=False, **options)
    trainer.fit(SmallModel(setting), IndexModule(setting))
    return trainer


@pytest.mark.shows("S15")
def test_another_thread_trains_without_handlers_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(fit_quickly().exit_code))
    thread.start()
    thread.join()
    assert results == [0]
    (text,) = [text for text in caplog.messages if "main thread" in text]
    assert text.startswith("fit runs outside the main thread, so it cannot save on a signal: SI")


class Curious(helios.Plugin):
    """Looks at the handlers while fit runs."""

    def __init__(self) -> None:
        super().__init__("curious")
        self.handlers: dict[str, list[Any]] = {}

    unsaved = ("handlers",)

    def setup(self) -> None:
        self._look("setup")

    def on_fit_end(self) -> None:
        self._look("end")

    def on_validation_start(self, validation_cycle: int) -> None:
        self._look("validation")

    def _look(self, when: str) -> None:
        self.handlers[when] = [signal.getsignal(number) for number in Signals().numbers]


@pytest.mark.shows("S15")
def test_handlers_are_there_from_the_start_of_fit_to_its_end_only() -> None:
    curious = Curious()
    before = [signal.getsignal(number) for number in Signals().numbers]
    fit_quickly(plugins=[curious])
    assert [signal.getsignal(number) for number in Signals().numbers] == before
    for when in ("setup", "end"):
        (handler,) = set(curious.handlers[when])
        assert isinstance(handler, SignalReceiver), when


@pytest.mark.shows("S15")
def test_evaluations_handle_them_too_unless_fit_returns() -> None:
    setting = Setting()
    before = [signal.getsignal(number) for number in Signals().numbers]
    for signals in (Signals(), RETURNS):
        curious = Curious()
        trainer = helios.Trainer(use_cpu=True, plugins=[curious], signals=signals)
        trainer.validate(SmallModel(setting), IndexModule(setting), checkpoint=None)
        assert (curious.handlers["validation"] == before) is (signals is RETURNS)
    assert [signal.getsignal(number) for number in Signals().numbers] == before

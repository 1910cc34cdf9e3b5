"""Who hears what: order, verbs, and errors of receivers."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest

from helios.hooks.bus import Bus
from helios.hooks.events import EVENTS, Receiver, Verb
from tests.support.quiet import Quiet

Log = list[tuple[Any, ...]]


class Listener:
    """Hears every event that is told, and notes its own name, the event and the arguments."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        for event in EVENTS.values():
            if event.verb is Verb.EMIT:
                setattr(self, event.name, partial(self.hear, log, event.name))

    def hear(self, log: Log, event: str, *args: Any) -> None:
        log.append((self.name, event, *args))


def owners(log: Log, *names: str) -> list[Listener]:
    return [Listener(name, log) for name in names]


@pytest.mark.shows("K1", "K2", "K3", "K26", "C8", "C14")
@pytest.mark.parametrize(
    "event", [name for name, event in EVENTS.items() if event.verb is Verb.EMIT]
)
def test_an_event_is_told_in_the_order_of_its_row(event: str) -> None:
    """C8, C14: plugins in order of registration; monitors after the model where the row says so."""
    log: Log = []
    _, monitor, _ = plugins = owners(log, "first", "monitor", "last")
    data, model, engine = owners(log, "data", "model", "engine")
    bus = Bus(plugins=plugins, monitors=[monitor], data=data, model=model, engine=engine)
    args = EVENTS[event].parameters
    bus.emit(event, *args)
    has_monitors = Receiver.MONITOR in EVENTS[event].receivers
    names = {
        Receiver.PLUGIN: ["first", "last"] if has_monitors else ["first", "monitor", "last"],
        Receiver.DATA: ["data"],
        Receiver.MODEL: ["model"],
        Receiver.ENGINE: ["engine"],
        Receiver.MONITOR: ["monitor"],
    }
    expected = [name for receiver in EVENTS[event].receivers for name in names[receiver]]
    assert log == [(name, event, *args) for name in expected]
    assert event in bus.active


class Voter(Quiet):
    def __init__(self, name: str, answer: Any, asked: list[str]) -> None:
        super().__init__(name)
        self.answer = answer
        self.asked = asked

    def should_training_stop(self) -> bool:
        self.asked.append(self.plug_id)
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.shows("H32", "C16")
@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([True, False, False], True),
        ([False, False, False], False),
        ([1, None, 0], True),
    ],
)
def test_everybody_is_asked_and_any_yes_is_a_yes(answers: list[Any], verdict: bool) -> None:
    """H32: an answer must not keep the others from being asked, or what they count would differ."""
    asked: list[str] = []
    plugins = [Voter(f"voter{number}", answer, asked) for number, answer in enumerate(answers)]
    assert Bus(plugins=plugins).ask("should_training_stop") is verdict
    assert asked == ["voter0", "voter1", "voter2"]


def test_on_the_way_out_everybody_is_told_and_errors_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of one must not keep the others from being torn down."""
    log: Log = []
    before, after = owners(log, "before", "after")

    class Broken(Quiet):
        def teardown(self) -> None:
            raise ZeroDivisionError("lost")

    bus = Bus(plugins=[before, Broken("broken"), after])
    bus.emit_to_all("teardown")
    assert [name for name, *_ in log] == ["before", "after"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "teardown" in record.getMessage()
    assert "Broken" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError

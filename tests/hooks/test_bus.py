"""Who hears what: order, verbs, and the checks of signatures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.bus import Bus, overridden
from helios.hooks.events import EVENTS, Receiver, Verb, silent
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.state import TrainingState

Log = list[tuple[Any, ...]]


class Listener:
    """Hears every event that is told, and notes its own name, the event and the arguments."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        for event in EVENTS.values():
            if event.verb is Verb.EMIT:
                setattr(self, event.name, self.listener(event.name, log))

    def listener(self, event: str, log: Log) -> Callable[..., None]:
        def hear(*args: Any) -> None:
            log.append((self.name, event, *args))

        return hear


class QuietModel(Model):
    def setup(self, fast_init: bool = False) -> None: ...


class QuietPlugin(Plugin):
    def setup(self) -> None: ...


def owners(log: Log, *names: str) -> list[Listener]:
    return [Listener(name, log) for name in names]


@pytest.mark.parametrize(
    "event", [name for name, event in EVENTS.items() if event.verb is Verb.EMIT]
)
def test_an_event_is_told_in_the_order_of_its_row(event: str) -> None:
    """C8, C14: plugins in order of registration; monitors after the model where the row says so."""
    log: Log = []
    first, monitor, last = plugins = owners(log, "first", "monitor", "last")
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
    assert bus.is_heard(event)
    assert last in plugins
    assert first in plugins


def test_a_monitor_hears_the_end_of_a_validation_after_the_model_and_its_start_before() -> None:
    """C14, spelled out."""
    log: Log = []
    plain, monitor, model, engine = owners(log, "plain", "monitor", "model", "engine")
    bus = Bus(plugins=[monitor, plain], monitors=[monitor], model=model, engine=engine)
    bus.emit("on_validation_start", 0)
    bus.emit("on_validation_end", 0)
    starts = [name for name, event, *_ in log if event == "on_validation_start"]
    ends = [name for name, event, *_ in log if event == "on_validation_end"]
    assert starts == ["monitor", "plain", "model", "engine"]
    assert ends == ["plain", "model", "monitor", "engine"]


def test_silent_base_methods_are_never_called() -> None:
    """DESIGN section 7: an event that nobody hears costs nothing."""
    bus = Bus(plugins=[QuietPlugin("quiet")], model=QuietModel("quiet"))
    heard = {name for name in EVENTS if bus.is_heard(name)}
    assert heard == {
        "on_training_batch_start",
        "on_training_batch_end",
        "on_validation_start",
        "on_validation_end",
        "on_testing_start",
    }
    bus.emit("on_training_start")
    assert bus.ask("should_training_stop") is False
    batch = object()
    assert bus.transform("process_training_batch", batch, TrainingState()) is batch


def test_a_bus_without_anybody_is_legal() -> None:
    bus = Bus()
    assert not any(map(bus.is_heard, EVENTS))
    bus.emit("on_training_start")
    bus.emit_to_all("teardown")


def test_a_method_set_on_an_object_is_heard_too() -> None:
    """Nothing silent (DESIGN R5): it is looked up as a call would do."""
    model, calls = QuietModel("quiet"), []
    model.on_training_end = lambda: calls.append("end")  # type: ignore[method-assign]
    Bus(model=model).emit("on_training_end")
    assert calls == ["end"]


def test_a_builtin_in_the_place_of_a_method_is_heard() -> None:
    """It has no attributes to look for a mark in."""
    plugin, losses = QuietPlugin("quiet"), []
    plugin.on_backward_start = losses.append  # type: ignore[attr-defined]
    Bus(plugins=[plugin]).emit("on_backward_start", 0.5)
    assert losses == [0.5]


def test_an_attribute_of_none_is_no_method() -> None:
    plugin = QuietPlugin("quiet")
    plugin.on_fit_start = None  # type: ignore[attr-defined]
    assert overridden(plugin, EVENTS["on_fit_start"]) is None
    assert not Bus(plugins=[plugin]).is_heard("on_fit_start")


def test_a_class_that_overrides_a_silent_method_is_heard_and_its_heirs_too() -> None:
    class Loud(QuietPlugin):
        def on_training_start(self) -> None: ...

    class Heir(Loud): ...

    class Muted(Loud):
        @silent
        def on_training_start(self) -> None: ...

    heard = [
        overridden(kind("loud"), EVENTS["on_training_start"]) is not None
        for kind in (QuietPlugin, Loud, Heir, Muted)
    ]
    assert heard == [False, True, True, False]


class Voter(QuietPlugin):
    def __init__(self, name: str, answer: Any, asked: list[str]) -> None:
        super().__init__(name)
        self.answer = answer
        self.asked = asked

    def should_training_stop(self) -> bool:
        self.asked.append(self.plug_id)
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([True, False, False], True),
        ([False, True, False], True),
        ([False, False, False], False),
        ([1, None, 0], True),
        ([None, None, None], False),
    ],
)
def test_everybody_is_asked_and_any_yes_is_a_yes(answers: list[Any], verdict: bool) -> None:
    """H32: an answer must not keep the others from being asked, or what they count would differ."""
    asked: list[str] = []
    plugins = [Voter(f"voter{number}", answer, asked) for number, answer in enumerate(answers)]
    assert Bus(plugins=plugins).ask("should_training_stop") is verdict
    assert asked == ["voter0", "voter1", "voter2"]


class Doubler(QuietPlugin):
    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch * 2 + state.global_iteration


def test_a_batch_is_mapped_by_its_owner() -> None:
    """H60, C12: overriding it makes the owner, no flag is needed."""
    bus = Bus(plugins=[QuietPlugin("quiet"), Doubler("doubler")])
    state = TrainingState(global_iteration=1)
    assert bus.transform("process_training_batch", 3, state) == 7
    assert bus.transform("process_validation_batch", 3, 0) == 3


def test_a_second_owner_of_a_batch_is_an_error() -> None:
    """H60, DESIGN section 7."""
    with pytest.raises(ArgumentError, match=r"process_training_batch must have one owner.* 2 "):
        Bus(plugins=[Doubler("one"), QuietPlugin("quiet"), Doubler("two")])


def test_the_owners_of_different_batches_may_differ() -> None:
    """H60."""

    class Other(QuietPlugin):
        def process_validation_batch(self, batch: Any, step: int) -> Any:
            return batch - step

    bus = Bus(plugins=[Doubler("doubler"), Other("other")])
    assert bus.transform("process_training_batch", 3, TrainingState()) == 6
    assert bus.transform("process_validation_batch", 3, 1) == 2


def hear_nothing(self: Any) -> None: ...
def hear_three(self: Any, state: Any, should_log: Any, more: Any) -> None: ...
def hear_other_keywords(self: Any, *, state: Any, log: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "found"),
    [
        (hear_nothing, "()"),
        (hear_three, "(state: Any, should_log: Any, more: Any)"),
        (hear_other_keywords, "(*, state: Any, log: Any)"),
    ],
)
def test_a_wrong_signature_is_an_error_that_says_what_is_expected_and_found(
    method: Callable[..., Any], found: str
) -> None:
    """DESIGN section 7: signatures are checked at registration."""
    wrong = type("Wrong", (QuietPlugin,), {"on_training_batch_end": method})
    with pytest.raises(ArgumentTypeError) as caught:
        Bus(plugins=[wrong("wrong")])
    message = str(caught.value).replace("'", "")
    assert "Wrong.on_training_batch_end must take (state, should_log)" in message
    assert f"but takes {found}" in message


@pytest.mark.parametrize(
    "method",
    [
        lambda self, batch, state: (batch, state),
        lambda self, batch, state=None: (batch, state),
        lambda self, a, b: (a, b),
        lambda self, *args: args,
        lambda self, batch, *args, **kwargs: (batch, *args),
        lambda self, *, batch, state: (batch, state),
        lambda self, *, state, batch: (batch, state),
        lambda self, **kwargs: (kwargs["batch"], kwargs["state"]),
        lambda self, batch, state, extra=None: (batch, state),
    ],
)
def test_a_method_takes_its_arguments_by_position_or_by_name(method: Callable[..., Any]) -> None:
    """API sections 13 and 15: models were called by position, plugins by keywords."""
    taker = type("Taker", (QuietPlugin,), {"process_training_batch": method})("taker")
    assert Bus(plugins=[taker]).transform("process_training_batch", "batch", "state") == (
        "batch",
        "state",
    )


@pytest.mark.parametrize(
    "method",
    [
        lambda self, state, batch: (batch, state),
        lambda self, batch, verbose=None, state=None: (batch, state),
        lambda self, a, *, state: (a, state),
    ],
)
def test_an_argument_reaches_the_parameter_of_its_name(method: Callable[..., Any]) -> None:
    """API section 15: plugins were called by keywords, so their order was theirs to choose."""
    taker = type("Taker", (QuietPlugin,), {"process_training_batch": method})("taker")
    assert Bus(plugins=[taker]).transform("process_training_batch", "batch", "state") == (
        "batch",
        "state",
    )


def test_only_what_overrides_an_event_is_checked() -> None:
    """A method of another name, or a silent one, may take what it likes."""

    class Free(QuietPlugin):
        def on_something_else(self, anything: Any) -> None: ...

        @silent
        def on_fit_start(self, unused: Any) -> None: ...

    assert not Bus(plugins=[Free("free")]).is_heard("on_fit_start")


def test_an_error_of_a_receiver_stops_the_telling_and_comes_out() -> None:
    log: Log = []
    before, after = owners(log, "before", "after")

    class Broken(QuietPlugin):
        def on_training_start(self) -> None:
            raise ZeroDivisionError

    bus = Bus(plugins=[before, Broken("broken"), after])
    with pytest.raises(ZeroDivisionError):
        bus.emit("on_training_start")
    assert [name for name, *_ in log] == ["before"]


def test_on_the_way_out_everybody_is_told_and_errors_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """DESIGN section 7: an error of one must not keep the others from being torn down."""
    log: Log = []
    before, after = owners(log, "before", "after")

    class Broken(QuietPlugin):
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


def test_an_interruption_on_the_way_out_is_not_swallowed() -> None:
    class Interrupted(QuietPlugin):
        def teardown(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Bus(plugins=[Interrupted("interrupted")]).emit_to_all("teardown")

"""Which parameters a receiver may have: those of the table, and the optional ones if it likes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from helios.errors import ArgumentTypeError
from helios.hooks.bus import Bus, check_receiver
from helios.hooks.events import EVENTS, silent
from tests.support.quiet import Quiet, QuietModel


def hear_nothing(self: Any) -> None: ...
def hear_three(self: Any, state: Any, should_log: Any, more: Any) -> None: ...
def hear_other_keywords(self: Any, *, state: Any, log: Any) -> None: ...


@pytest.mark.shows("K5")
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
    wrong = type("Wrong", (Quiet,), {"on_training_batch_end": method})
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
    taker = type("Taker", (Quiet,), {"process_training_batch": method})("taker")
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
    taker = type("Taker", (Quiet,), {"process_training_batch": method})("taker")
    assert Bus(plugins=[taker]).transform("process_training_batch", "batch", "state") == (
        "batch",
        "state",
    )


def test_only_what_overrides_an_event_is_checked() -> None:
    """A method of another name, or a silent one, may take what it likes."""

    class Free(Quiet):
        def on_something_else(self, anything: Any) -> None: ...

        @silent
        def on_fit_start(self, unused: Any) -> None: ...

    assert "on_fit_start" not in Bus(plugins=[Free("free")]).active


class Told:
    """What receivers of the end of a batch were told."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def by(self, method: Callable[..., Any], *more: int) -> Any:
        """Tell the end of validation batch 3 to a method, and of a loader if one is given."""
        owner = type("Taker", (Quiet,), {"on_validation_batch_end": method})("taker")
        owner.found = self.found  # type: ignore[attr-defined]
        Bus(plugins=[owner]).emit("on_validation_batch_end", 3, *more)
        return self.found.pop()


def take_step(self: Any, step: int) -> None:
    self.found.append(step)


def take_named_step(self: Any, *, step: int) -> None:
    self.found.append(step)


def take_step_and_more(self: Any, step: int, verbose: bool = False) -> None:
    self.found.append((step, verbose))


@pytest.mark.shows("K33")
@pytest.mark.parametrize(
    ("method", "told"),
    [(take_step, 3), (take_named_step, 3), (take_step_and_more, (3, False))],
)
def test_a_receiver_without_the_optional_argument_is_told_without_it(
    method: Callable[..., Any], told: Any
) -> None:
    """L32: one that was written for one loader goes on to work with several."""
    assert Told().by(method) == told
    assert Told().by(method, 1) == told


def take_both(self: Any, step: int, dataloader_idx: int = -1) -> None:
    self.found.append((step, dataloader_idx))


def take_any(self: Any, *args: Any) -> None:
    self.found.append(args if len(args) == 2 else (*args, -1))


def take_named_index(self: Any, step: int, *, dataloader_idx: int = -1) -> None:
    self.found.append((step, dataloader_idx))


def take_both_named(self: Any, *, dataloader_idx: int = -1, step: int) -> None:
    self.found.append((step, dataloader_idx))


def take_keywords(self: Any, **named: Any) -> None:
    self.found.append((named["step"], named.get("dataloader_idx", -1)))


def take_index_late(self: Any, step: int, verbose: bool = False, dataloader_idx: int = -1) -> None:
    self.found.append((step, dataloader_idx))
    assert verbose is False


@pytest.mark.shows("K33")
@pytest.mark.parametrize(
    "method",
    [take_both, take_any, take_named_index, take_both_named, take_keywords, take_index_late],
)
def test_a_receiver_of_the_optional_argument_gets_it_where_it_is_given(
    method: Callable[..., Any],
) -> None:
    """L32: told with several loaders only."""
    assert Told().by(method) == (3, -1)
    assert Told().by(method, 1) == (3, 1)


def test_the_work_of_a_step_is_called_in_the_same_way() -> None:
    """L32: `valid_step` may take `dataloader_idx`, and need not."""

    class One(QuietModel):
        def valid_step(self, batch: Any, step: int) -> Any:
            return batch, step

    class Several(QuietModel):
        def valid_step(self, batch: Any, step: int, dataloader_idx: int = 0) -> Any:
            return batch, step, dataloader_idx

    one, several = Bus(model=One("one")), Bus(model=Several("several"))
    assert one.call("valid_step", "batch", 3) == ("batch", 3)
    assert one.call("valid_step", "batch", 3, 1) == ("batch", 3)
    assert several.call("valid_step", "batch", 3) == ("batch", 3, 0)
    assert several.call("valid_step", "batch", 3, 1) == ("batch", 3, 1)


def test_a_batch_is_mapped_with_the_index_of_its_loader() -> None:
    class Mapper(Quiet):
        def process_testing_batch(self, batch: Any, step: int, dataloader_idx: int = 0) -> Any:
            return batch, step, dataloader_idx

    bus = Bus(plugins=[Mapper("mapper")])
    assert bus.transform("process_testing_batch", "batch", 3) == ("batch", 3, 0)
    assert bus.transform("process_testing_batch", "batch", 3, 1) == ("batch", 3, 1)


def test_an_optional_argument_must_not_be_demanded() -> None:
    """With one loader nobody gives it."""

    def demand(self: Any, step: int, dataloader_idx: int) -> None: ...

    wrong = type("Wrong", (Quiet,), {"on_testing_batch_end": demand})("wrong")
    expected = (
        r"Wrong\.on_testing_batch_end must take \(step\), and may take dataloader_idx, but takes "
        r"\(step: 'int', dataloader_idx: 'int'\)"
    )
    with pytest.raises(ArgumentTypeError, match=expected):
        Bus(plugins=[wrong])


@pytest.mark.parametrize(
    ("event", "method"),
    [
        ("on_training_batch_end", hear_nothing),
        ("process_training_batch", lambda self, batch: batch),
        ("should_training_stop", lambda self, state: False),
        ("setup", lambda self, stage: None),
        ("teardown", lambda self, stage: None),
    ],
)
def test_a_plugin_is_checked_before_there_is_a_bus(event: str, method: Callable[..., Any]) -> None:
    """DESIGN section 7: it is checked when it registers, whatever the verb."""
    wrong = type("Wrong", (Quiet,), {event: method})("wrong")
    with pytest.raises(ArgumentTypeError, match=rf"Wrong\.{event} must take \("):
        check_receiver(wrong)


def test_a_plugin_may_have_methods_of_the_same_name_that_are_no_events_for_it() -> None:
    """Data modules and models are told those events; a plugin is not."""

    class Free(Quiet):
        def prepare_data(self, url: str) -> None: ...

        def train_step(self) -> None: ...

        def have_metrics_improved(self, metrics: Any) -> None: ...

    check_receiver(Free("free"))
    assert "train_step" not in Bus(plugins=[Free("free")]).active


@pytest.mark.parametrize("event", ["train_step", "valid_step", "test_step", "predict_step"])
def test_the_steps_of_a_model_are_checked_too(event: str) -> None:
    wrong = type("Wrong", (QuietModel,), {event: lambda self, batch: None})("wrong")
    parameters = ", ".join(EVENTS[event].parameters)
    with pytest.raises(ArgumentTypeError, match=rf"Wrong\.{event} must take \({parameters}\)"):
        Bus(model=wrong)


async def hear_async(self: Any, state: Any) -> None: ...


def hear_by_generator(self: Any, state: Any) -> Any:
    yield


async def hear_by_async_generator(self: Any, state: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (hear_async, "is async: a call would not run its body. Write it without async."),
        (hear_by_async_generator, "is async: a call would not run its body"),
        (hear_by_generator, "is a generator: a call would not run its body. Write it without yie"),
        (staticmethod(functools.partial(hear_async, None)), "is async"),
    ],
)
def test_a_method_whose_body_nobody_runs_is_refused(method: Callable[..., Any], words: str) -> None:
    """DESIGN R5: a hook that never runs is a loss in silence."""
    kind = type("Deferred", (Quiet,), {"on_training_batch_start": method})
    for check in (check_receiver, lambda plugin: Bus(plugins=[plugin])):
        with pytest.raises(
            ArgumentTypeError, match=r"Deferred\.on_training_batch_start must be a p"
        ):
            check(kind("deferred"))
        with pytest.raises(ArgumentTypeError, match=words):
            check(kind("deferred"))


def test_only_a_training_step_may_be_a_generator() -> None:
    """C12: a YieldLoop runs it."""

    def step(self: Any, batch: Any, state: Any) -> Any:
        yield

    Bus(model=type("Yielding", (QuietModel,), {"train_step": step})("yielding"))
    with pytest.raises(ArgumentTypeError, match=r"Yielding\.valid_step must be a plain method"):
        Bus(model=type("Yielding", (QuietModel,), {"valid_step": step})("yielding"))


def test_something_that_cannot_be_called_is_refused() -> None:
    kind = type("Flagged", (Quiet,), {"on_log": True})
    with pytest.raises(ArgumentTypeError, match=r"Flagged\.on_log must be a method, got True"):
        check_receiver(kind("flagged"))


def test_an_optional_argument_without_a_default_is_told_so() -> None:
    """L32."""

    def step(self: Any, batch: Any, step: int, dataloader_idx: int) -> None: ...

    with pytest.raises(ArgumentTypeError, match="give them a default: dataloader_idx=0"):
        Bus(model=type("Eager", (QuietModel,), {"valid_step": step})("eager"))

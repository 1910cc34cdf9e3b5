"""Which parameters a receiver may have: those of the table, and the optional ones if it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helios.errors import ArgumentTypeError
from helios.hooks.bus import Bus, check_receiver
from helios.hooks.events import EVENTS
from tests.support.quiet import Quiet, QuietModel


def hear_nothing(self: Any) -> None: ...
def hear_three(self: Any, state: Any, should_log: Any, more: Any) -> None: ...
@pytest.mark.shows("K5")
@pytest.mark.parametrize(
    ("method", "found"),
    [
        (hear_nothing, "()"),
        (hear_three, "(state: Any, should_log: Any, more: Any)"),
    ],
)
def test_a_wrong_signature_is_an_error_that_says_what_is_expected_and_found(
    method: Callable[..., Any], found: str
) -> None:
    """Signatures are checked at registration."""
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
        lambda self, *args: args,
        lambda self, *, state, batch: (batch, state),
        lambda self, **kwargs: (kwargs["batch"], kwargs["state"]),
    ],
)
def test_a_method_takes_its_arguments_by_position_or_by_name(method: Callable[..., Any]) -> None:
    """Models were called by position, plugins by keywords."""
    taker = type("Taker", (Quiet,), {"process_training_batch": method})("taker")
    assert Bus(plugins=[taker]).transform("process_training_batch", "batch", "state") == (
        "batch",
        "state",
    )


@pytest.mark.parametrize("event", ["train_step", "valid_step"])
def test_the_steps_of_a_model_are_checked_too(event: str) -> None:
    wrong = type("Wrong", (QuietModel,), {event: lambda self: None})("wrong")
    parameters = ", ".join(EVENTS[event].parameters)
    with pytest.raises(ArgumentTypeError, match=rf"Wrong\.{event} must take \({parameters}\)"):
        Bus(model=wrong)


def take_batch(self: Any, batch: Any) -> Any:
    return batch


def take_batch_by_another_name(self: Any, images: Any) -> Any:
    return images


def take_batch_and_loader(self: Any, batch: Any, dataloader_idx: int = -1) -> Any:
    return batch, dataloader_idx


@pytest.mark.parametrize("event", ["train_step", "valid_step", "test_step", "predict_step"])
def test_a_step_may_leave_out_what_follows_the_batch(event: str) -> None:
    for method in (take_batch, take_batch_by_another_name):
        model = type("Short", (QuietModel,), {event: method})("short")
        assert Bus(model=model).call(event, "batch", 3) == "batch"


def test_a_step_that_leaves_out_its_number_still_gets_that_of_the_loader() -> None:
    model = type("Short", (QuietModel,), {"valid_step": take_batch_and_loader})("short")
    bus = Bus(model=model)
    assert bus.call("valid_step", "batch", 3) == ("batch", -1)
    assert bus.call("valid_step", "batch", 3, 1) == ("batch", 1)


def test_an_argument_is_never_taken_for_another_one_that_is_left_out() -> None:
    wrong = type("Wrong", (QuietModel,), {"train_step": lambda self, state: None})("wrong")
    with pytest.raises(ArgumentTypeError, match="may leave out state, but takes"):
        Bus(model=wrong)


async def hear_async(self: Any, state: Any) -> None: ...


def hear_by_generator(self: Any, state: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (hear_async, "is async: a call would not run its body. Write it without async."),
        (hear_by_generator, "is a generator: a call would not run its body. Write it without yie"),
    ],
)
def test_a_method_whose_body_nobody_runs_is_refused(method: Callable[..., Any], words: str) -> None:
    """A hook that never runs is a loss in silence."""
    kind = type("Deferred", (Quiet,), {"on_training_batch_start": method})
    for check in (check_receiver, lambda plugin: Bus(plugins=[plugin])):
        with pytest.raises(
            ArgumentTypeError, match=r"Deferred\.on_training_batch_start must be a p"
        ):
            check(kind("deferred"))
        with pytest.raises(ArgumentTypeError, match=words):
            check(kind("deferred"))

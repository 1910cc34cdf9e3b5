"""Hooks read the context; what they assign to it would be taken by some of Helios only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helios.errors import ArgumentTypeError, ReadOnlyError
from helios.hooks.context import CHANGES, Context
from helios.plugins.plugin import Plugin
from helios.state import Phase
from tests.loops.parts import ListSource, Stepper, fit, make_parts
from tests.support.quiet import Quiet

NAMES = sorted(
    name
    for name, member in vars(Context).items()
    if isinstance(member, property) and not name.startswith("_")
)


class Doing(Quiet):
    """Does something in an event."""

    def __init__(self, event: str, act: Callable[..., Any]) -> None:
        super().__init__("doing")
        setattr(self, event, lambda *args: act(self.context, *args))


class Assigning(Doing):
    def __init__(self, name: str) -> None:
        super().__init__("on_training_batch_start", lambda context, _: setattr(context, name, 3))


def train(*plugins: Plugin) -> Any:
    sources: Any = {Phase.TRAINING: [ListSource([[1.0], [1.0]])]}
    parts = make_parts(Stepper(), *plugins, sources=sources, total_steps=2)
    fit(parts)
    return parts


@pytest.mark.shows("K43")
@pytest.mark.parametrize("name", [*NAMES, "lss"])
def test_a_hook_can_assign_nothing_to_the_context(name: str) -> None:
    rule = rf"^context\.{name} must not be assigned: hooks only read the context\. \w.*\.$"
    with pytest.raises(ReadOnlyError) as caught:
        train(Assigning(name))
    assert re.match(rule, str(caught.value.args[0]))
    assert isinstance(caught.value, AttributeError)


def _double_gradients(context: Context) -> None:
    context.model.net.weight.grad *= 2


def _add_to_weights(context: Context, *_: Any) -> None:
    with torch.no_grad():
        context.model.net.weight += 10


def _skip_first(context: Context, optimizer: Any) -> None:
    if context.state.global_iteration == 1:
        context.skip_step("as a test")


SHOWN: list[Any] = []


WAYS: dict[str, tuple[str, Callable[..., Any], Callable[[Any], bool]]] = {
    "replace the batch": (
        "process_training_batch",
        lambda context, batch, state: 4.0,
        lambda parts: parts.model.weight == -4 - 2,
    ),
    "change gradients": (
        "on_backward_end",
        _double_gradients,
        lambda parts: parts.model.weight == -2 - 1,
    ),
    "skip an update": (
        "on_optimizer_step_start",
        _skip_first,
        lambda parts: parts.run.state.global_iteration == 3,
    ),
    "stop, interrupt or save": (
        "on_training_batch_start",
        lambda context, state: context.request_stop("as a test"),
        lambda parts: parts.run.state.global_iteration == 1,
    ),
    "log": (
        "on_training_batch_start",
        lambda context, state: context.log({"number": 3}),
        lambda parts: SHOWN == [{"number": 3.0}] * 2,
    ),
    "change weights, buffers, optimizers and schedulers": (
        "on_training_batch_end",
        _add_to_weights,
        lambda parts: parts.model.weight == 20 - 1 - 0.5,
    ),
}


@pytest.mark.shows("K43")
@pytest.mark.parametrize("what", [change.what for change in CHANGES])
def test_what_a_hook_may_change_it_can_change(what: str) -> None:
    if "cannot" in next(change.by for change in CHANGES if change.what == what):
        return
    event, act, is_changed = WAYS[what]
    SHOWN.clear()
    seeing = Doing("on_log", lambda context, scalars, state: SHOWN.append(scalars))
    seeing._plug_id = "seeing"
    parts = train(Doing(event, act), seeing)
    assert is_changed(parts)
    assert not is_changed(train()) or what == "log"


def test_numbers_are_logged_by_name_in_one_mapping() -> None:
    def log(context: Any, state: Any) -> None:
        context.log("loss", 3)

    with pytest.raises(ArgumentTypeError, match=r"context\.log\(\.\.\.\) must .* got 'loss', 3\."):
        train(Doing("on_training_batch_start", log))

"""Hooks read the context; what they assign to it would be taken by some of Helios only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from helios.errors import ArgumentTypeError, ReadOnlyError
from helios.hooks.context import Context
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


def test_numbers_are_logged_by_name_in_one_mapping() -> None:
    def log(context: Any, state: Any) -> None:
        context.log("loss", 3)

    with pytest.raises(ArgumentTypeError, match=r"context\.log\(\.\.\.\) must .* got 'loss', 3\."):
        train(Doing("on_training_batch_start", log))

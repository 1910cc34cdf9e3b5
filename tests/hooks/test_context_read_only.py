"""Hooks read the context; what they assign to it would be taken by some of Helios only."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from helios.errors import ArgumentTypeError
from helios.hooks.context import Context
from helios.plugins.plugin import Plugin
from helios.state import Phase
from tests.loops.sessions import ListSource, Stepper, fit, make_session

NAMES = sorted(
    name
    for name, member in vars(Context).items()
    if isinstance(member, property) and not name.startswith("_")
)


class Assigning(Plugin):
    def __init__(self, name: str) -> None:
        super().__init__("assigning")
        self.name = name

    def setup(self) -> None: ...

    def on_training_batch_start(self, state: Any) -> None:
        setattr(self.context, self.name, 3)


def train(*plugins: Plugin) -> None:
    sources: Any = {Phase.TRAINING: [ListSource([[1.0]])]}
    fit(make_session(Stepper(), *plugins, sources=sources, total_steps=1))


@pytest.mark.shows("K43")
@pytest.mark.parametrize("name", [*NAMES, "lss"])
def test_a_hook_can_assign_nothing_to_the_context(name: str) -> None:
    with pytest.raises(AttributeError, match=r"no (setter|attribute)") as caught:
        train(Assigning(name))
    assert any("Raised by plugin 'assigning'" in note for note in caught.value.__notes__)


def test_a_hook_may_refer_weakly_to_the_context() -> None:
    class Referring(Assigning):
        def on_training_batch_start(self, state: Any) -> None:
            assert weakref.ref(self.context)() is self.context

    train(Referring(""))


def test_all_that_loops_change_is_shown() -> None:
    assert {"batch", "loss", "model_outputs", "exception", "resumed", "optimizer"} <= {*NAMES}


def test_numbers_are_logged_by_name_in_one_mapping() -> None:
    class Logging(Assigning):
        def on_training_batch_start(self, state: Any) -> None:
            self.context.log("loss", 3)  # type: ignore[arg-type]

    with pytest.raises(ArgumentTypeError, match=r"context\.log\(\.\.\.\) must .* got 'loss', 3\."):
        train(Logging(""))

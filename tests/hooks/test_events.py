"""The table of events: its rows, its order, and the base classes that hear them."""

from __future__ import annotations

import inspect

import pytest

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.hooks.events import EVENTS, Receiver
from helios.model.model import Model
from helios.plugins.plugin import Plugin

P, D, M, E, MONITOR = (
    Receiver.PLUGIN,
    Receiver.DATA,
    Receiver.MODEL,
    Receiver.ENGINE,
    Receiver.MONITOR,
)


def methods_of(kind: type) -> list[str]:
    return [name for name in EVENTS if hasattr(kind, name)]


@pytest.mark.shows("C11")
@pytest.mark.parametrize("start", [name for name in EVENTS if name.endswith("_start")])
def test_scopes_are_pairs_that_the_same_receivers_hear_in_the_same_order(start: str) -> None:
    end = EVENTS[start.removesuffix("_start") + "_end"]
    both = tuple(receiver for receiver in end.receivers if receiver is not MONITOR)
    assert both == EVENTS[start].receivers
    names = list(EVENTS)
    assert names.index(start) < names.index(end.name)
    assert EVENTS[start].scope == end.scope


@pytest.mark.shows("K5", "K36")
@pytest.mark.parametrize("kind", [Model, Plugin, DataModule, Engine])
def test_base_methods_take_the_parameters_of_the_table(kind: type) -> None:
    for name in methods_of(kind):
        taken = tuple(inspect.signature(getattr(kind, name)).parameters)[1:]
        more = ("fast_init",) if (kind, name) == (Model, "setup") else ()
        assert taken == (*EVENTS[name].parameters, *more), (kind, name)

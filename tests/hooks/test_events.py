"""The table of events: its rows, its order, and the base classes that hear them."""

from __future__ import annotations

import inspect

import pytest

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.hooks.events import CHANNELS, EVENTS, Receiver, Verb
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


@pytest.mark.shows("K1", "C8")
def test_plugins_come_first_monitors_right_after_the_model_and_the_engine_last() -> None:
    """C8, C14."""
    for event in EVENTS.values():
        order = event.receivers
        if P in order and M in order:
            assert order.index(P) < order.index(M)
        if E in order:
            assert order[-1] is E
        if MONITOR in order:
            assert order.index(MONITOR) == order.index(M) + 1
        assert len(set(order)) == len(order)


@pytest.mark.shows("C11")
@pytest.mark.parametrize("start", [name for name in EVENTS if name.endswith("_start")])
def test_scopes_are_pairs_that_the_same_receivers_hear_in_the_same_order(start: str) -> None:
    end = EVENTS[start.removesuffix("_start") + "_end"]
    both = tuple(receiver for receiver in end.receivers if receiver is not MONITOR)
    assert both == EVENTS[start].receivers
    names = list(EVENTS)
    assert names.index(start) < names.index(end.name)
    assert EVENTS[start].scope == end.scope


@pytest.mark.shows("R1")
def test_every_channel_is_a_scope_with_a_beginning_and_an_end_in_each_phase() -> None:
    """R1: seven nested channels; on_loop and on_batch are those of every phase."""
    found = [event for event in EVENTS.values() if event.scope]
    assert {event.scope for event in found} == set(CHANNELS)
    assert len(set(CHANNELS)) == 7
    for event in found:
        assert event.name.endswith(("_start", "_end"))
        assert event.verb is Verb.EMIT
    starts = [event.scope for event in found if event.name.endswith("_start")]
    assert starts.count("on_loop") == 3
    assert starts.count("on_batch") == 4
    others = set(CHANNELS) - {"on_loop", "on_batch"}
    assert [starts.count(channel) for channel in others] == [1] * 5


@pytest.mark.shows("K5", "K36")
@pytest.mark.parametrize("kind", [Model, Plugin, DataModule, Engine])
def test_base_methods_take_the_parameters_of_the_table(kind: type) -> None:
    for name in methods_of(kind):
        taken = tuple(inspect.signature(getattr(kind, name)).parameters)[1:]
        more = ("fast_init",) if (kind, name) == (Model, "setup") else ()
        assert taken == (*EVENTS[name].parameters, *more), (kind, name)

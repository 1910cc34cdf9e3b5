"""The table of events: its rows, its order, and the base classes that hear them."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import pytest

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.hooks.events import EVENTS, Event, Receiver, Verb, is_silent, silent
from helios.model.model import Model
from helios.plugins.plugin import Plugin

P, D, M, E, MONITOR = (
    Receiver.PLUGIN,
    Receiver.DATA,
    Receiver.MODEL,
    Receiver.ENGINE,
    Receiver.MONITOR,
)

# Of FEATURES section 8 and API section 13: who hears it, and with which arguments.
ROWS = {
    "on_load_checkpoint": ("PDEM", "checkpoint"),
    "on_checkpoint_loaded": ("PDEM", ""),
    "on_fit_start": ("PM", ""),
    "on_training_start": ("PME", ""),
    "on_training_resume": ("PM", "state"),
    "on_training_epoch_start": ("PME", "current_epoch"),
    "on_training_step_start": ("PM", "state"),
    "on_training_batch_start": ("PME", "state"),
    "process_training_batch": ("P", "batch state"),
    "on_backward_start": ("PM", "loss"),
    "on_backward_end": ("PM", ""),
    "on_optimizer_step_start": ("PM", "optimizer"),
    "on_before_zero_grad": ("PM", "optimizer"),
    "on_optimizer_step_end": ("PM", "optimizer committed"),
    "on_training_batch_end": ("PME", "state should_log"),
    "on_training_step_end": ("PM", "state committed"),
    "should_training_stop": ("PM", ""),
    "on_validation_start": ("PME", "validation_cycle"),
    "on_validation_batch_start": ("PME", "step"),
    "process_validation_batch": ("P", "batch step"),
    "on_validation_batch_end": ("PME", "step"),
    "on_validation_end": ("PM*E", "validation_cycle"),
    "on_save_checkpoint": ("PDEM", "checkpoint"),
    "on_training_epoch_end": ("PM*E", "current_epoch"),
    "on_training_end": ("PME", ""),
    "on_testing_start": ("PME", ""),
    "on_testing_batch_start": ("PME", "step"),
    "process_testing_batch": ("P", "batch step"),
    "on_testing_batch_end": ("PME", "step"),
    "on_testing_end": ("PME", ""),
    "on_predicting_start": ("PME", ""),
    "on_predicting_batch_start": ("PME", "step"),
    "process_predicting_batch": ("P", "batch step"),
    "on_predicting_batch_end": ("PME", "step prediction"),
    "on_predicting_end": ("PME", ""),
    "on_exception": ("PDME", "exception"),
    "on_fit_end": ("PM", ""),
    "teardown": ("DPM", ""),
}
LETTERS = {"P": P, "D": D, "M": M, "E": E, "*": MONITOR}
ACTING = {
    "on_training_batch_start",
    "on_training_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_testing_start",
}


def methods_of(kind: type) -> list[str]:
    return [name for name in EVENTS if name in vars(kind)]


def test_the_table_is_the_published_one() -> None:
    """FEATURES section 8, DESIGN section 9 (C8, C14)."""
    found = {name: (event.receivers, event.parameters) for name, event in EVENTS.items()}
    assert found == {
        name: (tuple(LETTERS[letter] for letter in receivers), tuple(parameters.split()))
        for name, (receivers, parameters) in ROWS.items()
    }


def test_plugins_hear_an_event_before_the_model_and_monitors_after_it() -> None:
    """C8, C14."""
    for event in EVENTS.values():
        order = event.receivers
        if P in order and M in order:
            assert order.index(P) < order.index(M)
        if MONITOR in order:
            assert order.index(MONITOR) == order.index(M) + 1
        assert len(set(order)) == len(order)


@pytest.mark.parametrize("start", [name for name in EVENTS if name.endswith("_start")])
def test_scopes_are_pairs_that_the_same_receivers_hear_in_the_same_order(start: str) -> None:
    """DESIGN section 7, C11."""
    end = EVENTS[start.removesuffix("_start") + "_end"]
    both = tuple(receiver for receiver in end.receivers if receiver is not MONITOR)
    assert both == EVENTS[start].receivers
    names = list(EVENTS)
    assert names.index(start) < names.index(end.name)


def test_batches_are_mapped_by_plugins_only_and_polls_are_questions() -> None:
    """C12, H32."""
    verbs = {name: event.verb for name, event in EVENTS.items() if event.verb is not Verb.EMIT}
    transforms = {name: Verb.TRANSFORM for name in EVENTS if name.startswith("process_")}
    assert verbs == {**transforms, "should_training_stop": Verb.ASK}
    for name in transforms:
        assert EVENTS[name].receivers == (P,)
        assert EVENTS[name].parameters[0] == "batch"


def test_every_row_says_when_it_is_told() -> None:
    """DESIGN section 7: the docs page is generated from the table."""
    assert all(event.moment and event.name == name for name, event in EVENTS.items())


@pytest.mark.parametrize("kind", [Model, Plugin, DataModule, Engine])
def test_base_methods_take_the_parameters_of_the_table(kind: type) -> None:
    """API sections 13 to 15."""
    for name in methods_of(kind):
        if name == "teardown" and kind is Engine:
            continue
        taken = tuple(inspect.signature(getattr(kind, name)).parameters)[1:]
        assert taken == EVENTS[name].parameters


def test_base_methods_that_do_nothing_are_marked_and_all_others_are_not() -> None:
    """DESIGN section 7: an event that nobody hears costs nothing; H58."""
    for kind in (Model, Plugin):
        for name in methods_of(kind):
            is_acting = kind is Model and name in ACTING
            assert is_silent(getattr(kind, name)) is not is_acting, (kind, name)


@pytest.mark.parametrize(
    "name",
    [
        "on_training_start",
        "process_training_batch",
        "on_training_end",
        "on_validation_start",
        "process_validation_batch",
        "on_validation_end",
        "should_training_stop",
        "on_testing_start",
        "process_testing_batch",
        "on_testing_end",
    ],
)
def test_a_plugin_has_the_historical_methods(name: str) -> None:
    """API section 15."""
    assert name in vars(Plugin)


def test_the_mark_of_silence_is_seen_through_an_instance_and_lost_by_an_override() -> None:
    class Base:
        @silent
        def hear(self) -> None: ...

    class Heir(Base):
        def hear(self) -> None:
            super().hear()

    class Quiet(Base): ...

    assert is_silent(Base().hear)
    assert is_silent(Quiet().hear)
    assert not is_silent(Heir().hear)
    assert not is_silent(Heir.hear)


def test_an_override_that_copies_the_looks_of_the_base_method_is_heard() -> None:
    """`functools.wraps` copies marks too: the override would be left out in silence (DESIGN R5)."""

    class Base:
        @silent
        def hear(self) -> None: ...

    class Heir(Base):
        @functools.wraps(Base.hear)
        def hear(self) -> None: ...

    assert not is_silent(Heir().hear)
    assert is_silent(Base().hear)


def test_a_row_cannot_be_changed() -> None:
    event: Event = EVENTS["on_training_start"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.name = "other"  # type: ignore[misc]

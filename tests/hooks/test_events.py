"""The table of events: its rows, its order, and the base classes that hear them."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

from helios.data.datamodule import DataModule
from helios.engines.engine import Engine
from helios.hooks.events import CHANNELS, EVENTS, Event, Receiver, Verb
from helios.model.model import Model
from helios.plugins.plugin import Plugin

P, D, M, E, MONITOR = (
    Receiver.PLUGIN,
    Receiver.DATA,
    Receiver.MODEL,
    Receiver.ENGINE,
    Receiver.MONITOR,
)
LETTERS = {"P": P, "D": D, "M": M, "E": E, "*": MONITOR}

# Who receives it in which order, with which arguments (those in brackets only where there are
# several loaders), in which channel. Verbs stand in the next table; what is not there is told to
# all.
ROWS = """
prepare_data               D
setup                      PDM
on_load_checkpoint         PDME  checkpoint
on_checkpoint_loaded       PDME
on_fit_start               PM
on_sanity_check_start      P
on_sanity_check_end        P
on_training_start          PME   | on_loop
on_training_resume         PM    state
on_training_epoch_start    PME   current_epoch | on_epoch
on_training_step_start     PM    state | on_step
on_training_batch_start    PME   state | on_batch
process_training_batch     P     batch state
on_forward_start           PM    context | on_model_forward
train_step                 M     batch state
on_forward_end             PM    context | on_model_forward
on_backward_start          PM    loss | on_model_backward
on_backward_end            PM    | on_model_backward
on_optimizer_step_start    PM    optimizer | on_optimizer_step
on_before_zero_grad        PM    optimizer
on_optimizer_step_end      PM    optimizer committed | on_optimizer_step
on_training_batch_end      PME   state should_log | on_batch
on_training_step_end       PM    state committed | on_step
on_log                     PM    scalars state
should_training_stop       PM
on_training_epoch_end      PM*E  current_epoch | on_epoch
on_save_checkpoint         PDME  checkpoint
on_training_end            PME   | on_loop
on_validation_start        PME   validation_cycle
on_validation_batch_start  PME   step [dataloader_idx] | on_batch
process_validation_batch   P     batch step [dataloader_idx]
valid_step                 M     batch step [dataloader_idx]
on_validation_batch_end    PME   step [dataloader_idx] | on_batch
on_validation_end          PM*E  validation_cycle
have_metrics_improved      M
on_testing_start           PME   | on_loop
on_testing_batch_start     PME   step [dataloader_idx] | on_batch
process_testing_batch      P     batch step [dataloader_idx]
test_step                  M     batch step [dataloader_idx]
on_testing_batch_end       PME   step [dataloader_idx] | on_batch
on_testing_end             PME   | on_loop
on_predicting_start        PME   | on_loop
on_predicting_batch_start  PME   step [dataloader_idx] | on_batch
process_predicting_batch   P     batch step [dataloader_idx]
predict_step               M     batch step [dataloader_idx]
on_predicting_batch_end    PME   step prediction [dataloader_idx] | on_batch
on_predicting_end          PME   | on_loop
on_exception               PDME  exception
on_fit_end                 PM
teardown                   DPM
"""
VERBS = {
    **dict.fromkeys(("prepare_data", "setup", "have_metrics_improved"), Verb.CALL),
    **dict.fromkeys(("train_step", "valid_step", "test_step", "predict_step"), Verb.CALL),
    "process_training_batch": Verb.TRANSFORM,
    "process_validation_batch": Verb.TRANSFORM,
    "process_testing_batch": Verb.TRANSFORM,
    "process_predicting_batch": Verb.TRANSFORM,
    "should_training_stop": Verb.ASK,
}


def row_of(line: str) -> Event:
    """Read a line of the table above; the moment is none of its business."""
    told, _, scope = line.partition("|")
    name, receivers, *arguments = told.split()
    optional = [name.strip("[]") for name in arguments if name.startswith("[")]
    return Event(
        name,
        tuple(argument for argument in arguments if not argument.startswith("[")),
        tuple(LETTERS[letter] for letter in receivers),
        moment="",
        verb=VERBS.get(name, Verb.EMIT),
        optional=tuple(optional),
        scope=scope.strip(),
    )


def methods_of(kind: type) -> list[str]:
    return [name for name in EVENTS if hasattr(kind, name)]


@pytest.mark.shows("H52", "K4", "K6", "K12", "K36", "K41")
def test_the_table_is_the_published_one_row_by_row() -> None:
    found = [dataclasses.replace(event, moment="") for event in EVENTS.values()]
    assert found == [row_of(line) for line in ROWS.split("\n")[1:-1]]


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


@pytest.mark.parametrize(("kind", "receiver"), [(Model, M), (Plugin, P)])
def test_every_event_is_a_declared_and_documented_method_of_who_receives_it(
    kind: type, receiver: Receiver
) -> None:
    """An editor completes it, with its types, its arguments and its documentation."""
    received = [event.name for event in EVENTS.values() if receiver in event.receivers]
    assert methods_of(kind) == received
    for name in received:
        method = getattr(kind, name)
        hints = typing.get_type_hints(method)
        assert "return" in hints, name
        assert hints.keys() - {"return"} >= set(EVENTS[name].parameters), name
        assert len(inspect.getdoc(method) or "") > 20, name


@pytest.mark.shows("K5", "K36")
@pytest.mark.parametrize("kind", [Model, Plugin, DataModule, Engine])
def test_base_methods_take_the_parameters_of_the_table(kind: type) -> None:
    for name in methods_of(kind):
        taken = tuple(inspect.signature(getattr(kind, name)).parameters)[1:]
        more = ("fast_init",) if (kind, name) == (Model, "setup") else ()
        assert taken == (*EVENTS[name].parameters, *more), (kind, name)

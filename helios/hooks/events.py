"""The table of events: what is told, to whom, with which arguments, in which order.

Docs are generated from it, signatures are checked against it, and the bus reads nothing else.
Methods keep the names and parameters that Helios users know (FEATURES section 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

Method = TypeVar("Method", bound=Callable[..., object])


class Verb(Enum):
    """How an event is told."""

    EMIT = "tell all"
    ASK = "any says yes"
    TRANSFORM = "the one owner maps a batch"


class Receiver(Enum):
    """Who may hear an event; the order of the table's column is the order of the calls (C8)."""

    PLUGIN = "plugins, in order of registration"
    DATA = "data module"
    MODEL = "model"
    ENGINE = "engine"
    MONITOR = "plugins with monitor = True"


P, D, M, E, MONITOR = (
    Receiver.PLUGIN,
    Receiver.DATA,
    Receiver.MODEL,
    Receiver.ENGINE,
    Receiver.MONITOR,
)


@dataclass(frozen=True)
class Event:
    """One row of the table.

    Attributes:
        name: the method that hears it.
        parameters: names of its arguments after ``self``.
        receivers: who may hear it, in the order of the calls.
        moment: when it is told.
        verb: how it is told.
    """

    name: str
    parameters: tuple[str, ...]
    receivers: tuple[Receiver, ...]
    moment: str
    verb: Verb = Verb.EMIT


def _rows() -> tuple[Event, ...]:
    pme, pm = (P, M, E), (P, M)
    state, step, cycle = ("state",), ("step",), ("validation_cycle",)
    ask, transform = Verb.ASK, Verb.TRANSFORM
    return (
        Event("on_load_checkpoint", ("checkpoint",), (P, D, E, M), "before a state is loaded"),
        Event("on_checkpoint_loaded", (), (P, D, E, M), "after all state is loaded"),
        Event("on_fit_start", (), pm, "everything is set up and loaded"),
        Event("on_training_start", (), pme, "once, before model.train()"),
        Event("on_training_resume", state, pm, "after on_training_start, at every resume"),
        Event("on_training_epoch_start", ("current_epoch",), pme, "an epoch begins; from 1"),
        Event("on_training_step_start", state, pm, "first micro-batch of a window"),
        Event("on_training_batch_start", state, pme, "a batch was fetched, counters have moved"),
        Event("process_training_batch", ("batch", "state"), (P,), "batch on device", transform),
        Event("on_backward_start", ("loss",), pm, "automatic mode: before backward"),
        Event("on_backward_end", (), pm, "automatic mode: after backward"),
        Event("on_optimizer_step_start", ("optimizer",), pm, "gradients final, not yet clipped"),
        Event("on_before_zero_grad", ("optimizer",), pm, "right after step and schedulers"),
        Event("on_optimizer_step_end", ("optimizer", "committed"), pm, "gradients are gone"),
        Event("on_training_batch_end", ("state", "should_log"), pme, "the batch is done"),
        Event("on_training_step_end", ("state", "committed"), pm, "last micro-batch of a window"),
        Event("should_training_stop", (), pm, "after a batch, a validation, an epoch", ask),
        Event("on_validation_start", cycle, pme, "after model.eval(); cycles from 0"),
        Event("on_validation_batch_start", step, pme, "a batch was fetched; from 0"),
        Event("process_validation_batch", ("batch", "step"), (P,), "batch on device", transform),
        Event("on_validation_batch_end", step, pme, "after valid_step"),
        Event("on_validation_end", cycle, (P, M, MONITOR, E), "modes are restored"),
        Event("on_save_checkpoint", ("checkpoint",), (P, D, E, M), "a snapshot was taken"),
        Event("on_training_epoch_end", ("current_epoch",), (P, M, MONITOR, E), "an epoch ends"),
        Event("on_training_end", (), pme, "the run is finished"),
        Event("on_testing_start", (), pme, "after model.eval()"),
        Event("on_testing_batch_start", step, pme, "a batch was fetched; from 0"),
        Event("process_testing_batch", ("batch", "step"), (P,), "batch on device", transform),
        Event("on_testing_batch_end", step, pme, "after test_step"),
        Event("on_testing_end", (), pme, "all batches are done"),
        Event("on_predicting_start", (), pme, "after model.eval()"),
        Event("on_predicting_batch_start", step, pme, "a batch was fetched; from 0"),
        Event("process_predicting_batch", ("batch", "step"), (P,), "batch on device", transform),
        Event("on_predicting_batch_end", ("step", "prediction"), pme, "after predict_step"),
        Event("on_predicting_end", (), pme, "all batches are done"),
        Event("on_exception", ("exception",), (P, D, M, E), "an exception leaves the training"),
        Event("on_fit_end", (), pm, "after the engine's teardown"),
        Event(
            "teardown", (), (D, P, M), "always, also after an exception; the engine's was before"
        ),
    )


EVENTS: dict[str, Event] = {event.name: event for event in _rows()}


def silent(method: Method) -> Method:
    """Mark a base class's method as one that does nothing, so that the bus need not call it."""
    # The mark names its method: functools.wraps copies it to overrides, which are not silent.
    method.__dict__["_helios_silent"] = method
    return method


def is_silent(method: Callable[..., object]) -> bool:
    """Whether a method carries the mark of :func:`silent`."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_helios_silent", None) is function

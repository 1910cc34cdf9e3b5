"""The table of events: their receivers, arguments and order.

``docs/hooks.md`` is generated from it, signatures of receivers are checked against it, and the bus
reads nothing else. Methods keep the names and parameters that users of Helios know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., object])


class Verb(Enum):
    """What happens when an event occurs."""

    EMIT = "call all receivers"
    ASK = "true if any receiver returns True"
    TRANSFORM = "its one owner maps a batch"
    CALL = "a method that does the work itself"


class Receiver(Enum):
    """Who may receive an event; the order of the table's column is the order of the calls."""

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
        name: name of the method that receives it.
        parameters: names of its arguments after ``self``.
        receivers: who may receive it, in the order of the calls.
        moment: when it occurs.
        verb: what happens then.
        optional: names of further arguments, for methods that take them.
        scope: the channel that it begins or ends, if any.
    """

    name: str
    parameters: tuple[str, ...]
    receivers: tuple[Receiver, ...]
    moment: str
    verb: Verb = Verb.EMIT
    optional: tuple[str, ...] = ()
    scope: str = ""


def _start_rows() -> tuple[Event, ...]:
    call, pdme = Verb.CALL, (P, D, M, E)
    return (
        Event("prepare_data", (), (D,), "once, before everything else", call),
        Event("setup", (), (P, D, M), "build networks, data and the like", call),
        Event("on_load_checkpoint", ("checkpoint",), pdme, "fit resumes; nothing is loaded yet"),
        Event("on_checkpoint_loaded", (), pdme, "everything is loaded except the generators"),
        Event("on_fit_start", (), (P, M), "fit: everything is set up and loaded"),
        Event("on_sanity_check_start", (), (P,), "a new run; sanity_steps is set"),
        Event("on_sanity_check_end", (), (P,), "changes of the sanity check are undone"),
    )


def _training_start_rows() -> tuple[Event, ...]:
    pme, pm, state = (P, M, E), (P, M), ("state",)
    loop, epoch, step, batch = "on_loop", "on_epoch", "on_step", "on_batch"
    return (
        Event(
            "on_training_start",
            (),
            pme,
            "training starts or resumes; before model.train()",
            scope=loop,
        ),
        Event("on_training_resume", state, pm, "after on_training_start, if the run resumes"),
        Event(
            "on_training_epoch_start",
            ("current_epoch",),
            pme,
            "an epoch begins, numbered from 1; not again after a resume inside it",
            scope=epoch,
        ),
        Event(
            "on_training_step_start", state, pm, "the first batch of a window begins", scope=step
        ),
        Event(
            "on_training_batch_start",
            state,
            pme,
            "a batch was fetched and counted; it is not on the device yet",
            scope=batch,
        ),
        Event(
            "process_training_batch",
            ("batch", "state"),
            (P,),
            "the batch is on the device",
            Verb.TRANSFORM,
        ),
    )


def _step_rows() -> tuple[Event, ...]:
    pm, optimizer, context = (P, M), ("optimizer",), ("context",)
    forward, backward, update = "on_model_forward", "on_model_backward", "on_optimizer_step"
    return (
        Event("on_forward_start", context, pm, "before a step, in any phase", scope=forward),
        Event("train_step", ("batch", "state"), (M,), "the training step", Verb.CALL),
        Event("on_forward_end", context, pm, "outputs and loss are available", scope=forward),
        Event(
            "on_backward_start", ("loss",), pm, "automatic mode: before backward", scope=backward
        ),
        Event("on_backward_end", (), pm, "automatic mode: after backward", scope=backward),
        Event(
            "on_optimizer_step_start",
            optimizer,
            pm,
            "automatic mode, end of a window: gradients are averaged, not yet clipped",
            scope=update,
        ),
        Event("on_before_zero_grad", optimizer, pm, "right after the update and the schedulers"),
        Event(
            "on_optimizer_step_end",
            ("optimizer", "committed"),
            pm,
            "gradients are cleared",
            scope=update,
        ),
    )


def _training_end_rows() -> tuple[Event, ...]:
    pme, pm, pmme = (P, M, E), (P, M), (P, M, MONITOR, E)
    loop, epoch, step, batch = "on_loop", "on_epoch", "on_step", "on_batch"
    return (
        Event(
            "on_training_batch_end",
            ("state", "should_log"),
            pme,
            "the batch is done",
            scope=batch,
        ),
        Event(
            "on_training_step_end",
            ("state", "committed"),
            pm,
            "the last batch of a window is done",
            scope=step,
        ),
        Event(
            "on_log",
            ("scalars", "state"),
            pm,
            "numbers were logged: losses, scores, context.log",
        ),
        Event(
            "should_training_stop",
            (),
            pm,
            "after a batch; after a validation by steps; after an epoch by epochs",
            Verb.ASK,
        ),
        Event(
            "on_training_epoch_end",
            ("current_epoch",),
            pmme,
            "an epoch ends; by steps after its checkpoint, by epochs before it",
            scope=epoch,
        ),
        Event(
            "on_save_checkpoint",
            ("checkpoint",),
            (P, D, M, E),
            "a snapshot was taken and is written next",
        ),
        Event(
            "on_training_end",
            (),
            pme,
            "the run is finished; not after an interruption or an exception",
            scope=loop,
        ),
    )


def _evaluation_rows(noun: str, step: str, cycle: tuple[str, ...] = ()) -> tuple[Event, ...]:
    pme, index, batch = (P, M, E), ("dataloader_idx",), "on_batch"
    is_validation = noun == "validation"
    loop = "" if is_validation else "on_loop"
    result = ("step", "prediction") if noun == "predicting" else ("step",)
    return (
        Event(f"on_{noun}_start", cycle, pme, "after model.eval()", scope=loop),
        Event(
            f"on_{noun}_batch_start",
            ("step",),
            pme,
            "a batch was fetched; steps count from 0 in each loader",
            optional=index,
            scope=batch,
        ),
        Event(
            f"process_{noun}_batch",
            ("batch", "step"),
            (P,),
            "the batch of a replica is on the device",
            Verb.TRANSFORM,
            optional=index,
        ),
        Event(step, ("batch", "step"), (M,), "without gradients", Verb.CALL, optional=index),
        Event(f"on_{noun}_batch_end", result, pme, f"after {step}", optional=index, scope=batch),
        Event(
            f"on_{noun}_end",
            cycle,
            (P, M, MONITOR, E) if is_validation else pme,
            "the pass is finished and modes are restored",
            scope=loop,
        ),
    )


def _end_rows() -> tuple[Event, ...]:
    return (
        Event(
            "on_exception",
            ("exception",),
            (P, D, M, E),
            "an exception ends the call; nothing is torn down yet",
        ),
        Event(
            "on_fit_end",
            (),
            (P, M),
            "fit returns, finished or interrupted; the engine is torn down",
        ),
        Event(
            "teardown", (), (D, P, M), "always, also after an exception; the engine is torn down"
        ),
    )


def _rows() -> tuple[Event, ...]:
    improved = Event("have_metrics_improved", (), (M,), "after each validation of fit", Verb.CALL)
    return (
        *_start_rows(),
        *_training_start_rows(),
        *_step_rows(),
        *_training_end_rows(),
        *_evaluation_rows("validation", "valid_step", ("validation_cycle",)),
        improved,
        *_evaluation_rows("testing", "test_step"),
        *_evaluation_rows("predicting", "predict_step"),
        *_end_rows(),
    )


EVENTS: dict[str, Event] = {event.name: event for event in _rows()}

CHANNELS = (
    "on_loop",
    "on_epoch",
    "on_step",
    "on_batch",
    "on_model_forward",
    "on_model_backward",
    "on_optimizer_step",
)


def silent(method: Method) -> Method:
    """Mark the method of a base class as one that does nothing, so that the bus does not call it.

    ``super().<method>(...)`` in an override reaches it, and then a mixin after the base class, if
    that has the method.
    """

    @functools.wraps(method)
    def base(self: Any, *args: Any, **kwargs: Any) -> Any:
        following = find_after_base(self, method.__name__)
        return method(self, *args, **kwargs) if following is None else following(*args, **kwargs)

    # The mark names its method: functools.wraps copies it to overrides, which are not silent.
    base.__dict__["_helios_silent"] = base
    return cast("Method", base)


def find_after_base(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the method of a mixin after the base class, which has a silent one.

    ``None`` if there is none, or if a class has silenced the method of its base.
    """
    kinds = [kind for kind in type(owner).__mro__ if name in vars(kind)]
    silent_ones = [kind for kind in kinds if is_silent(vars(kind)[name])]
    if len(silent_ones) != 1 or silent_ones == kinds[-1:]:
        return None
    return cast("Callable[..., Any]", getattr(super(silent_ones[0], owner), name))


def asks_nothing(method: Method) -> Method:
    """Mark a method that requests no checkpoint, end or skip, and changes no losses.

    The processes of a run then need no further exchange after it. A method that overrides it is not
    marked.
    """
    method.__dict__["_helios_asks_nothing"] = method
    return method


def may_ask(method: Callable[..., object]) -> bool:
    """Whether a method lacks the mark of :func:`asks_nothing`."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_helios_asks_nothing", None) is not function


def is_silent(method: Callable[..., object]) -> bool:
    """Whether a method has the mark of :func:`silent`."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_helios_silent", None) is function

"""The situations whose event logs are golden files: how a run goes, ends, breaks and goes on."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helios.hooks.events import EVENTS, Receiver
from tests.support.event_logs import (
    LEGEND,
    Call,
    Line,
    ManualLinear,
    Reaction,
    ScoringLinear,
    play,
    render,
)

UNITS = ("epochs", "steps")
_WORDS = {"epochs": "epoch", "steps": "iteration"}


@dataclasses.dataclass(frozen=True)
class Situation:
    """Calls in one folder, each in a trainer of its own, of which the last one counts."""

    title: str
    calls: tuple[Call, ...]

    def record(self) -> list[Line]:
        with tempfile.TemporaryDirectory() as folder:
            return [play(call, Path(folder)).lines for call in self.calls][-1]


def _fail(owner: Any) -> None:
    raise OSError("on purpose")


def _leave(owner: Any) -> None:
    raise StopIteration


def _options(unit: str, total_steps: float, **more: Any) -> dict[str, Any]:
    given = {"train_unit": _WORDS[unit], "total_steps": total_steps, "chkpt_frequency": 1}
    return {**given, **more}


def _regular(unit: str) -> Iterator[tuple[str, Situation]]:
    """Runs that come to their end."""

    def fit(title: str, **fields: Any) -> Situation:
        return Situation(title, (Call(**{"options": options, "training": 2, **fields}),))

    options = _options(unit, {"epochs": 2, "steps": 3}[unit], print_frequency=2)
    options["valid_frequency"] = {"epochs": 1, "steps": 2}[unit]
    yield (
        f"fit_by_{unit}",
        fit(f"By {unit}: two batches an epoch.", evaluation=1, model=ScoringLinear),
    )
    several = {**options, "accumulation_steps": 3, "total_steps": 2, "valid_frequency": 1}
    title = f"By {unit}: windows of three batches, four batches an epoch."
    yield (
        f"fit_by_{unit}_accumulating",
        fit(title, options=several, training=4, evaluation=2),
    )
    title = f"By {unit}: train_step returns None and steps itself; there is no validation data."
    yield f"manual_steps_by_{unit}", fit(title, model=ManualLinear)
    skipping = Reaction(
        "on_optimizer_step_start", lambda owner: owner.context.skip_step("on purpose"), 2
    )
    title = f"By {unit}: a plugin leaves out the second update."
    yield f"skipped_step_by_{unit}", fit(title, evaluation=1, reactions=(skipping,))


def _special() -> Iterator[tuple[str, Situation]]:
    call = Call(options=_options("epochs", 1, sanity_steps=2), training=1, evaluation=3)
    title = "sanity_steps=2: a trial of two validation batches before the training."
    yield "sanity_check", Situation(title, (call,))
    call = Call(options=_options("epochs", 0), evaluation=1)
    yield "nothing_to_do", Situation("total_steps=0.", (call,))


_YES = Reaction("should_training_stop", lambda owner: True)
_INTERRUPTION = Reaction(
    "on_training_batch_end", lambda owner: owner.context.interrupt("the time is over")
)
_WISHES = {
    "stop_poll": ("a stop poll is answered with yes", _YES),
    "request_stop": (
        "a stop is requested",
        Reaction("on_training_batch_end", lambda owner: owner.context.request_stop("enough")),
    ),
    "interruption": ("an interruption is asked for", _INTERRUPTION),
}


def _ends(unit: str) -> Iterator[tuple[str, Situation]]:

    def fit(title: str, options: dict[str, Any], *reactions: Reaction, **fields: Any) -> Situation:
        fields = {"training": 2, "evaluation": 1, **fields}
        return Situation(
            f"By {unit}: {title}", (Call(options=options, reactions=reactions, **fields),)
        )

    options = _options(unit, 9, valid_frequency=1)
    patient = {**options, "early_stop_cycles": 2}
    title = "two validations without improvement, early_stop_cycles=2."
    yield f"early_stop_by_{unit}", fit(title, patient, model=ScoringLinear)
    windows = {**options, "accumulation_steps": 2}
    for name, (text, wish) in _WISHES.items():
        title = f"{text} in the first of a window's two batches."
        yield f"{name}_by_{unit}", fit(title, windows, wish, training=4)
    late = dataclasses.replace(_YES, number={"epochs": 3, "steps": 2}[unit])
    title = "a stop poll behind a safe point is answered with yes."
    yield f"late_stop_poll_by_{unit}", fit(title, options, late)
    title = "the same, where no checkpoint was due."
    yield f"late_stop_poll_saves_by_{unit}", fit(title, {**options, "chkpt_frequency": 9}, late)
    title = "an interruption is asked for in an epoch's last batch."
    last = dataclasses.replace(_INTERRUPTION, number=2)
    yield f"interruption_at_an_epochs_end_by_{unit}", fit(title, options, last)
    for place in ("step_start", "batch_start"):
        event = f"on_training_{place}"
        title = f"StopIteration from {event}, in the second batch."
        short = _options(unit, 2)
        leaving = Reaction(event, _leave, 2)
        yield f"stop_iteration_in_{place}_by_{unit}", fit(title, short, leaving, training=3)


def _crash(options: dict[str, Any], batch: int, *more: Reaction, **fields: Any) -> Call:
    """Return a call that an exception ends in the n-th training step."""
    reactions = (Reaction("train_step", _fail, batch, "M"), *more)
    return Call(options=options, reactions=reactions, error=OSError, **fields)


def _resumes() -> Iterator[tuple[str, Situation]]:
    def on(title: str, options: dict[str, Any], batch: int, *more: Reaction) -> Situation:
        crashed = _crash(options, batch, *more, training=2, evaluation=1)
        call = Call(options=options, training=2, evaluation=1)
        return Situation(title, (crashed, call))

    asking = Reaction("on_training_batch_end", lambda owner: owner.context.request_checkpoint())
    title = "By epochs: on from a requested checkpoint inside epoch 1."
    yield "resume_in_mid_epoch_by_epochs", on(title, _options("epochs", 1), 2, asking)
    title = "By steps: on from the checkpoint after batch 1 of 2."
    yield "resume_in_mid_epoch_by_steps", on(title, _options("steps", 2), 2)
    title = "By steps: on from the checkpoint after batch 1 of 2, behind a validation."
    validating = _options("steps", 2, valid_frequency=1)
    yield "resume_behind_a_validation", on(title, validating, 2)
    for unit in UNITS:
        title = f"By {unit}: on from the checkpoint at the end of epoch 1."
        options = _options(unit, {"epochs": 2, "steps": 3}[unit])
        yield f"resume_at_an_epochs_end_by_{unit}", on(title, options, 3)
    call, title = Call(options=_options("epochs", 1)), "A run that has ended is started again."
    yield "finished_run", Situation(title, (call, call))


def _evaluations(verb: str) -> Iterator[tuple[str, Situation]]:
    fit = Call(options=_options("epochs", 1), training=1, model=ScoringLinear)
    call = Call(verb, evaluation=2, model=ScoringLinear)
    yield verb, Situation(f"trainer.{verb} of a checkpoint, two batches.", (fit, call))
    call = Call(verb, evaluation=2, loaders=2, model=ScoringLinear)
    title = f"trainer.{verb} of a checkpoint, two loaders of two batches."
    yield f"{verb}_with_two_loaders", Situation(title, (fit, call))
    title = f"trainer.{verb} without data for it."
    yield f"{verb}_without_data", Situation(title, (Call(verb),))


@functools.cache
def situations() -> dict[str, Situation]:
    found = [*_special(), *_resumes()]
    for unit in UNITS:
        found += [*_regular(unit), *_ends(unit)]
    for verb in ("validate", "test", "predict"):
        found += _evaluations(verb)
    return dict(found)


_RESUMING = ("on_load_checkpoint", "on_checkpoint_loaded", "on_training_resume")
_VERBS = {
    "testing": "test",
    "test_step": "test",
    "predict": "predict",
    "on_validation_batch": "validate",
    "valid_step": "validate",
}


def _raising(event: str) -> Situation:
    """Return a situation in which a receiver of an event raises."""
    receivers = EVENTS[event].receivers
    letter = "P" if Receiver.PLUGIN in receivers else "D" if Receiver.DATA in receivers else "M"
    reactions = (Reaction(event, _fail, 1, letter),)
    if event == "on_exception":
        reactions += (Reaction("train_step", _fail, 1, "M"),)
    calls = (
        Call(
            options=_options("epochs", 1, valid_frequency=1, print_frequency=1, sanity_steps=2),
            training=1,
            evaluation=1,
            reactions=reactions,
            error=None if event == "teardown" else OSError,
        ),
    )
    if event in _RESUMING:
        options = _options("epochs", 2)
        calls = (
            _crash(options, 2, training=1),
            dataclasses.replace(calls[0], options=options),
        )
    for part, verb in _VERBS.items():
        if part in event:
            calls = (dataclasses.replace(calls[0], verb=verb, options={}),)
    title = f"{letter} raises in {event}"
    if calls[-1].verb != "fit":
        title += f", in trainer.{calls[-1].verb}"
    return Situation(title, calls)


@functools.cache
def exceptions() -> dict[str, Situation]:
    return {event: _raising(event) for event in EVENTS}


@functools.cache
def everything() -> dict[str, Situation]:
    """Return the situations, and those with an exception as ``exception in <event>``."""
    failing = {f"exception in {event}": situation for event, situation in exceptions().items()}
    return {**situations(), **failing}


@functools.cache
def lines_of(name: str) -> tuple[Line, ...]:
    """Return what is told in a situation; it is recorded once."""
    return tuple(everything()[name].record())


def lines_after_exception(event: str) -> tuple[Line, ...]:
    """Return what is told where a receiver of an event raises, from that telling on."""
    name = f"exception in {event}"
    letter, lines = everything()[name].title[0], lines_of(name)
    told = [line.name == event and letter in line.letters for line in lines]
    return lines[told.index(True) :]


def golden_log(name: str) -> str:
    return f"# {situations()[name].title}\n{LEGEND}\n{render(lines_of(name))}"


def golden_log_of_exceptions() -> str:
    """Return the text of the log that has a section for each event in which a receiver raises."""
    text = f"# An exception out of one receiver in each event: what is told from then on.\n{LEGEND}"
    for event, situation in exceptions().items():
        text += f"\n# {situation.title}\n{render(lines_after_exception(event))}"
    return text


def golden_logs() -> dict[str, str]:
    logs = {f"{name}.txt": golden_log(name) for name in situations()}
    return {**logs, "exceptions.txt": golden_log_of_exceptions()}

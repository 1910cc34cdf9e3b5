"""The page of events, docs/hooks.md: rendered from the table and from the trainer's docstrings.

``scripts/make_golden.py`` writes it; a test compares it with what is rendered here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from helios.hooks.context import CHANGES
from helios.hooks.events import EVENTS, Event, Receiver, Verb
from helios.trainer import Trainer
from tests.support.event_grammar import Node, parse, pseudocode_of, unparse

_NAMES = {
    Receiver.PLUGIN: "plugins",
    Receiver.DATA: "data module",
    Receiver.MODEL: "model",
    Receiver.ENGINE: "engine",
    Receiver.MONITOR: "monitors",
}
_VERBS = {
    Verb.EMIT: "all receivers are called",
    Verb.ASK: "all receivers are called; the result is True if any of them returns True",
    Verb.TRANSFORM: "one plugin may override it and return another batch; a second one is an error",
    Verb.CALL: "not an event, but a method that does the work; listed for its place in the order",
}
_AS = re.compile(r"``(\w+)``\s+for\s+``(\w+)``")

# The order of events inside a batch if train_step is a generator.
GENERATOR = """\
process_training_batch(batch, state)
on_forward_start(context)
train_step(batch, state)
for each optimizer:
    if it is not the first: on_forward_start(context)
    on_forward_end(context)
    if it has parameters to train:
        on_backward_start(loss)
        engine.backward_loss(loss)
        on_backward_end()
    if the window ends:
        on_optimizer_step_start(optimizer)
        if the step is not skipped:
            engine.clip_gradients(optimizer)
            engine.optimizer_step(optimizer)
        on_before_zero_grad(optimizer)
        engine.zero_grad(optimizer)
        on_optimizer_step_end(optimizer, committed)
"""

# What follows the last window of a run that is interrupted inside an epoch.
INTERRUPTION = """\
should_training_stop()
if steps are counted and a validation is due: a validation cycle
on_save_checkpoint(checkpoint)
if steps are counted and a validation was due: should_training_stop()
engine.teardown()
on_fit_end()
teardown()
"""

_INTRODUCTION = """\
# Events and hooks

*Read first: [Your first run](start.md).*

To receive an event, define a method with its name and arguments in a plugin, the model, the data
module or the engine; the table shows which of them receive it. They are called from left to right,
plugins in the order of their registration, also for end events. *Monitors* are plugins with
`monitor = True`. A method with other arguments raises an error before the first step.

- An exception in a plugin ends the run like any other; only `StopIteration` from
  `on_training_step_start` or `on_training_batch_start` ends the epoch instead.
- Steps may omit the arguments in brackets: `train_step(self, batch)`. Methods that also take
  `dataloader_idx` get the number of the loader.
- Arguments named `state` are the live `TrainingState`: copy values that you keep. `current_epoch`
  counts from 1, `validation_cycle` and `step` from 0.
- Channels are the scopes of [hook contexts](extending.md#hook-contexts).
- `self.context.log` emits `on_log` immediately. Losses are means over the iterations since the last
  `should_log`, over micro-batches and replicas.
- With [several replicas](extending.md#several-replicas), steps, `process_*_batch` and the hooks of
  forward and backward are called once for each replica that a process runs.

`scripts/make_golden.py` generates this page from `helios/hooks/events.py` and the docstrings of
`Trainer`.

## Counters

| term | meaning | number, from 0 |
|---|---|---|
| iteration, micro-step | one batch for each replica | `global_micro_step_id` |
| window | the `accumulation_steps` iterations of an update | `window_index` inside of it |
| step | a window and its update | `global_step_id` |
| epoch | one pass over the data | `epoch_id` |

The counters of `TrainingState` count from 1: `global_iteration` iterations, `global_epoch` epochs,
and `current_iteration` steps in a run that counts steps, iterations in one that counts epochs.
"""

_READ_ONLY = "Everything else is read-only: an assignment raises a `ReadOnlyError`."


def _changes() -> str:
    rows = "".join(f"| {change.what} | {change.by} |\n" for change in CHANGES)
    return f"\n## What a hook may change\n\n| a hook may | how |\n|---|---|\n{rows}\n{_READ_ONLY}\n"


def _row(event: Event) -> str:
    in_brackets = (f"[{name}]" for name in event.omittable + event.optional)
    arguments = ", ".join((*event.required, *in_brackets))
    receivers = ", ".join(_NAMES[receiver] for receiver in event.receivers)
    cells = (
        f"`{event.name}`",
        f"`{arguments}`" if arguments else "",
        receivers,
        _summary(event),
        event.verb.name.lower(),
        f"`{event.scope}`" if event.scope else "",
    )
    return f"| {' | '.join(cells)} |\n"


def _summary(event: Event) -> str:
    text = re.sub(r":\w+:`", "`", event.summary.replace("``", "`"))
    text = text.removeprefix("Called ").rstrip(".").replace("|", r"\|")
    return text[0].lower() + text[1:]


def _table() -> str:
    verbs = "".join(f"- *{verb.name.lower()}*: {text}.\n" for verb, text in _VERBS.items())
    head = "| event | arguments | receivers, in order | when, or what it does | verb | channel |\n"
    rows = "".join(_row(event) for event in EVENTS.values())
    return f"\n## The table\n\nVerbs:\n\n{verbs}\n{head}|---|---|---|---|---|---|\n{rows}"


def _sequence(title: str, text: str, nodes: Iterable[Node]) -> str:
    return f"\n### {title}\n\n{text}\n\n```text\n{unparse(nodes)}```\n"


def pseudocode(verb: str) -> tuple[Node, ...]:
    """Return the order of calls in a method of the trainer, as its docstring says."""
    if verb in ("fit", "validate"):
        return parse(pseudocode_of(getattr(Trainer, verb)))
    text = pseudocode_of(Trainer.validate)
    for new, old in _AS.findall(getattr(Trainer, verb).__doc__):
        text = text.replace(old, new)
    return parse(text)


def _pass(verb: str) -> tuple[Node, ...]:
    """Return the pass over the data in a separate evaluation, without what surrounds it."""
    return next(node for node in pseudocode(verb) if node.text == "if there is data:").body


_FIT_TEXT = """\
A run counts epochs with `train_unit="epoch"`, steps with `train_unit="iteration"`. After an
exception, only the calls below `finally` follow."""
_INTERRUPTION_TEXT = """\
After `context.interrupt`, a signal, or a time limit, the run ends at the next safe point, and `fit`
raises `helios.Interrupted` at the end of its teardown. If the run counts epochs and has reached the
last batch of one, that safe point is the end of the epoch; otherwise it is the end of a window.
These calls follow the last event of the window:"""
_RESUME_TEXT = """\
The start of an epoch is not emitted again if the run resumes inside it. If the run counts steps and
the checkpoint was saved after the last batch of an epoch, the end of that epoch comes first. From
then on, the events are those of an uninterrupted run."""
_GENERATOR_TEXT = """\
These events occur between `on_training_batch_start` and `on_training_batch_end`; the step itself
continues from yield to yield."""


def _sequences() -> str:
    parts = (
        ("fit", f"{_FIT_TEXT}\n\n{_RESUME_TEXT}", pseudocode("fit")),
        ("validate", "`trainer.validate`:", pseudocode("validate")),
        ("test", "Around the pass, `trainer.test` makes the calls of `validate`:", _pass("test")),
        ("predict", "So does `trainer.predict`:", _pass("predict")),
        ("After an interruption", _INTERRUPTION_TEXT, parse(INTERRUPTION)),
        ("A step that is a generator", _GENERATOR_TEXT, parse(GENERATOR)),
    )
    head = "\n## Order of calls\n\n`if` marks calls that may happen, `for each` repeated calls.\n"
    return head + "".join(_sequence(*part) for part in parts)


def render() -> str:
    """Return the page."""
    return _INTRODUCTION + _changes() + _table() + _sequences()

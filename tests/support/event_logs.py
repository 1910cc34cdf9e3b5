"""Event logs: everything that a run tells, in order, with who heard it and with which counters.

A recording has a line for each telling: ``QPME on_training_epoch_start(1)``. Q is a plugin with
``monitor = True``, registered first, P another plugin, D the data module, M the model, E the
engine. Calls that events lie between, such as ``model.eval()``, are noted too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helios
from helios.engines.engine import Engine
from helios.hooks.context import Context
from helios.hooks.events import EVENTS, Receiver, Verb
from helios.loops import YieldLoop
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.runs import RETURNS

LEGEND = """\
# Q: a plugin with monitor = True, registered first; P: another; D: data module; M: model; E: engine
# state[e epoch, b complete batches of it, i global_iteration, c current_iteration, v validations]
"""
RECEIVERS = {
    "P": Receiver.PLUGIN,
    "Q": Receiver.PLUGIN,
    "D": Receiver.DATA,
    "M": Receiver.MODEL,
    "E": Receiver.ENGINE,
}
# Calls that are no events; they show what lies between events.
MODEL_CALLS = ("train", "eval")
ENGINE_CALLS = ("backward_loss", "clip_gradients", "optimizer_step", "zero_grad", "teardown")
CALLS = {
    **{name: f"model.{name}" for name in MODEL_CALLS},
    **{name: f"engine.{name}" for name in ENGINE_CALLS},
}


@dataclasses.dataclass
class Line:
    """One telling: who heard it, in the order of the calls, and with which arguments."""

    letters: str
    name: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.letters:<7}{self.told}"

    @property
    def told(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclasses.dataclass(frozen=True)
class Reaction:
    """What a receiver does when it hears an event: it may raise, answer, or ask for something.

    Attributes:
        number: which telling, from 1; 0 for each.
    """

    event: str
    act: Callable[[Any], Any]
    number: int = 1
    letter: str = "P"


class Recording:
    """The lines of one run, and what its receivers do in it."""

    def __init__(self, reactions: Iterable[Reaction] = ()) -> None:
        self.lines: list[Line] = []
        self._reactions = tuple(reactions)
        self._counts: dict[tuple[str, str], int] = {}

    @property
    def names(self) -> list[str]:
        return [line.name for line in self.lines]

    def hear(self, letter: str, name: str, owner: object, args: tuple[Any, ...]) -> Any:
        """Note that a receiver hears an event; returns its answer, if it has one."""
        arguments = ", ".join(_describe(name, place, given) for place, given in enumerate(args))
        last = self.lines[-1] if self.lines else Line("", "", "")
        if (last.name, last.arguments) == (name, arguments) and letter not in last.letters:
            last.letters += letter
        else:
            self.lines.append(Line(letter, name, arguments))
        self._counts[letter, name] = count = self._counts.get((letter, name), 0) + 1
        for reaction in self._reactions:
            is_its_turn = reaction.number in (0, count)
            if (reaction.letter, reaction.event) == (letter, name) and is_its_turn:
                return reaction.act(owner)
        return None


def _describe(name: str, place: int, given: Any) -> str:
    if isinstance(given, TrainingState):
        counters = f"e{given.global_epoch} b{given.dataset_iter} i{given.global_iteration}"
        return f"state[{counters} c{given.current_iteration} v{given.validation_cycles}]"
    if isinstance(given, bool | int):
        return str(given)
    if isinstance(given, BaseException):
        return type(given).__name__
    if isinstance(given, Context):
        return "context"
    event = EVENTS[name]
    parameter = (*event.parameters, *event.optional)[place]
    if parameter == "checkpoint":
        state = given["training_state"]
        return f"checkpoint[e{state['global_epoch']} i{state['global_iteration']}]"
    if parameter == "scalars":
        return f"scalars[{' '.join(given)}]"
    return parameter


class Linear(helios.Model):
    def __init__(self) -> None:
        super().__init__("linear")

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        if not fast_init:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return self.net(batch).square().mean()

    def predict_step(self, batch: Any, step: int) -> Any:
        return self.net(batch)


class ManualLinear(Linear):
    """Does backward and steps itself."""

    def train_step(self, batch: Any, state: TrainingState) -> None:
        super().train_step(batch, state).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ScoringLinear(Linear):
    """Has a validation score, which never improves."""

    def valid_step(self, batch: Any, step: int) -> Any:
        return {"score": (self.net(batch).sum(), len(batch))}

    def have_metrics_improved(self) -> bool:
        return False


class TwoNetworks(Linear):
    """Yields a loss for each of two optimizers."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.second = nn.Linear(1, 1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        yield self.net(batch).square().mean()
        yield self.second(batch).square().mean()


class Numbers(helios.DataModule):
    """Ones, one a batch."""

    def __init__(self, training: int = 3, evaluation: int = 0, loaders: int = 1) -> None:
        super().__init__()
        self.lengths = training, evaluation
        self.loaders = loaders

    def setup(self) -> None:
        training, evaluation = self.lengths
        self._train_dataset = self._make(training)
        if evaluation:
            several = [self._make(evaluation) for _ in range(self.loaders)]
            data = several[0] if self.loaders == 1 else several
            self._valid_dataset = self._test_dataset = self._predict_dataset = data

    def _make(self, length: int) -> Any:
        return self._create_dataset(torch.ones(length, 1), helios.DataLoaderParams(batch_size=1))


class Monitor(Quiet):
    """Hears the end events after the model; the other plugin owns the batches."""

    monitor = True


def _listen(
    recording: Recording, letter: str, name: str, usual: Callable[..., Any] | None
) -> Callable[..., Any]:
    is_event = name in EVENTS and not (letter == "E" and name == "teardown")
    noted = name if is_event else CALLS[name]

    def listen(self: Any, *args: Any, **named: Any) -> Any:
        answer = recording.hear(letter, noted, self, args if is_event else ())
        if usual is not None:
            result = usual(self, *args[:taken], **named)
            return result if answer is None else answer
        return args[0] if name.startswith("process_") else answer

    taken = 0 if usual is None else len(inspect.signature(usual).parameters) - 1
    return listen


def listener(kind: type, letter: str, recording: Recording) -> Any:
    """Return a subclass that notes each event which its receiver may hear, and goes on as usual."""
    events = [event for event in EVENTS.values() if RECEIVERS[letter] in event.receivers]
    if letter == "Q":
        events = [event for event in events if event.verb is not Verb.TRANSFORM]
    more = {"M": MODEL_CALLS, "E": ENGINE_CALLS}.get(letter, ())
    methods = {
        name: _listen(recording, letter, name, _usual(kind, name))
        for name in (*(event.name for event in events), *more)
    }
    return type(kind.__name__, (kind,), methods)


def _usual(kind: type, name: str) -> Callable[..., Any] | None:
    # A plugin's base maps a batch to itself; then the listener does the same.
    return None if name.startswith("process_") else getattr(kind, name, None)


@dataclasses.dataclass(frozen=True)
class Call:
    verb: str = "fit"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: int = 3
    evaluation: int = 0
    loaders: int = 1
    reactions: tuple[Reaction, ...] = ()
    model: type[Linear] = Linear
    error: type[BaseException] | None = None


def play(call: Call, folder: Path | None = None) -> Recording:
    recording = Recording(call.reactions)
    plugins = [
        listener(Monitor, "Q", recording)("monitor"),
        listener(Quiet, "P", recording)("plugin"),
    ]
    trainer = helios.Trainer(
        engine=listener(Engine, "E", recording)(torch.device("cpu")),
        plugins=plugins,
        chkpt_root=folder,
        print_banner=False,
        signals=RETURNS,
        **call.options,
    )
    model = listener(call.model, "M", recording)()
    data = listener(Numbers, "D", recording)(call.training, call.evaluation, call.loaders)
    if call.model is TwoNetworks:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())
    is_untrained = call.verb != "fit" and not (folder and any(folder.rglob("*.pth")))
    try:
        getattr(trainer, call.verb)(model, data, **({"checkpoint": None} if is_untrained else {}))
    except BaseException as error:
        if type(error) is not call.error:
            raise
    else:
        assert call.error is None, f"{call.error} should have been raised"
    return recording


# How deep a scope lies; a scope ends with the one around it, even if its own end is not told.
_DEPTHS = {"on_training": 0, "on_training_epoch": 1, "on_training_step": 2, "on_training_batch": 3}


def render(lines: Iterable[Line]) -> str:
    """Return lines as text, indented by the scopes that they lie in."""
    scopes: list[str] = []
    text = ""
    for line in lines:
        name = line.name
        if name in ("on_exception", "engine.teardown"):
            scopes.clear()
        scope = name.removesuffix("_start").removesuffix("_end")
        if scope != name:
            scopes = _close(scopes, scope)
        text += f"{line.letters:<7}{'  ' * len(scopes)}{line.told}\n"
        if name.endswith("_start") and name != "on_fit_start":
            scopes.append(scope)
    return text


def _close(scopes: list[str], scope: str) -> list[str]:
    """Return the scopes that are open behind the end of one, or around its beginning."""
    if scope in _DEPTHS:
        return [kept for kept in scopes if _DEPTHS.get(kept, 9) < _DEPTHS[scope]]
    return scopes[: scopes.index(scope)] if scope in scopes else scopes

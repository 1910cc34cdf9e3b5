"""Hook channels in whole runs: order and nesting, errors, interruptions, fields, restarts (R1-R26).

What is expected was written by hand from the statements: ``step(batch(...))`` is a step with one
batch in it; v, t and p stand before what belongs to a validation, a test and a prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helios
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS
from helios.model.processor import BatchProcessor
from helios.plugins import Plugin
from helios.plugins.channels import HookContext, PipelineHooks
from helios.state import Phase
from tests.support.models import OneLayer, forward
from tests.support.quiet import Quiet

_SHORT = {
    "on_model_forward": "forward",
    "on_model_backward": "backward",
    "on_optimizer_step": "update",
}
_MARKS = {
    Phase.TRAINING: "",
    Phase.VALIDATION: "v:",
    Phase.TESTING: "t:",
    Phase.PREDICTION: "p:",
}


def short(channel: str) -> str:
    """Return how logs call a channel."""
    return _SHORT.get(channel, channel.removeprefix("on_"))


class Linear(OneLayer):
    rate = 0.01


class Numbers(helios.DataModule):
    """1, 2, 3 ..., one a batch."""

    def __init__(self, training: int = 3, validation: int = 0) -> None:
        super().__init__()
        self.lengths = training, validation

    def setup(self) -> None:
        training, validation = self.lengths
        self._train_dataset = self._make(training)
        if validation:
            self._valid_dataset = self._make(validation)
        self._test_dataset = self._predict_dataset = self._make(2)

    def _make(self, length: int) -> Any:
        numbers = torch.arange(1.0, length + 1).unsqueeze(1)
        return self._create_dataset(numbers, helios.DataLoaderParams(batch_size=1))


class Teller(Quiet):
    """Does something at one event; in the list behind the hooks, so inside of their scopes."""

    def __init__(self, event: str = "", act: Callable[[], None] = lambda: None) -> None:
        super().__init__("teller")
        if event:
            setattr(self, event, lambda *args: act())


class Noting(HookContext):
    """Notes beginnings and ends, with the exception that it finds."""

    def __init__(self, log: list[str], channel: str, name: str = "") -> None:
        self.log = log
        self.name = short(channel) + name

    def on_enter(self, ctx: Context) -> None:
        self.log.append(f"{_MARKS[ctx.phase]}{self.name}(")

    def on_exit(self, ctx: Context) -> None:
        error = f" {ctx.exception}" if ctx.exception is not None else ""
        self.log.append(f"{_MARKS[ctx.phase]}{self.name}){error}")


def noting(log: list[str], name: str = "", plug_id: str = "notes") -> PipelineHooks:
    """Return a set that notes all channels."""
    hooks = PipelineHooks(plug_id)
    for channel in CHANNELS:
        hooks.register(channel, Noting(log, channel, name))
    return hooks


def make_trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    """Return a trainer on the CPU."""
    given = {"train_unit": "iteration", "total_steps": 4, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **options}, plugins=list(plugins))


def scope(name: str, *inner: str) -> str:
    return " ".join([f"{name}(", *inner, f"{name})"])


def batch(*more: str) -> str:
    return scope("batch", scope("forward"), scope("backward"), *more)


OPEN = batch()
LAST = batch(scope("update"))
STEP = scope("step", LAST)
VALID = scope("v:batch", scope("v:forward"))


_FITS = {
    "by steps": (
        {"valid_frequency": 2},
        Numbers(3, 2),
        scope(
            "loop",
            scope("epoch", STEP, STEP, VALID, VALID, STEP),
            scope("epoch", STEP, VALID, VALID),
        ),
    ),
    # The second window goes across the end of the epoch: two scopes, one in each.
    "by steps, windows of 3": (
        {"accumulation_steps": 3, "total_steps": 3, "valid_frequency": 2},
        Numbers(4, 1),
        scope(
            "loop",
            scope("epoch", scope("step", OPEN, OPEN, LAST), scope("step", OPEN)),
            scope("epoch", scope("step", OPEN, LAST), VALID, scope("step", OPEN, OPEN)),
            scope("epoch", scope("step", LAST)),
        ),
    ),
}


@pytest.mark.shows("K22", "R1", "R2", "R3", "R4", "R5", "R6", "R9", "R27", "C10")
@pytest.mark.parametrize("name", _FITS)
def test_channels_nest_in_a_training(name: str) -> None:
    options, data, expected = _FITS[name]
    log: list[str] = []
    make_trainer(noting(log), **options).fit(Linear(), data)
    assert log == expected.split()


@pytest.mark.shows("R1", "R6")
@pytest.mark.parametrize(("call", "mark"), [("validate", "v:"), ("test", "t:"), ("predict", "p:")])
def test_channels_nest_in_an_evaluation(call: str, mark: str) -> None:
    log: list[str] = []
    getattr(make_trainer(noting(log)), call)(Linear(), Numbers(1, 2), checkpoint=None)
    one = scope(f"{mark}batch", scope(f"{mark}forward"))
    assert log == scope(f"{mark}loop", one, one).split()


@pytest.mark.shows("R13", "C11")
def test_two_sets_take_turns() -> None:
    log: list[str] = []
    hooks = [noting(log, "1", "first"), noting(log, "2", "second")]
    make_trainer(*hooks, total_steps=1).fit(Linear(), Numbers(1))
    both = [
        f"{name}{number}{mark}"
        for name in ("loop", "epoch", "step", "batch")
        for mark in "("
        for number in "12"
    ]
    assert log[:8] == both
    assert log[-8:] == [f"{name}{n})" for name in ("batch", "step", "epoch", "loop") for n in "12"]


_OUTER = {
    "on_loop": (),
    "on_batch": ("on_loop", "on_epoch", "on_step"),
    "on_optimizer_step": ("on_loop", "on_epoch", "on_step", "on_batch"),
}
_STARTS = {
    "on_loop": "on_training_start",
    "on_batch": "on_training_batch_start",
    "on_optimizer_step": "on_optimizer_step_start",
}


class WrongError(ValueError):
    """What goes wrong on purpose."""


def go_wrong(*args: Any) -> None:
    raise WrongError("wrong")


def _left(channel: str, names: str = "ab", error: str = " wrong") -> list[str]:
    return [f"{short(channel)}{name}){error}" for name in names]


@pytest.mark.shows("K34", "R12", "R14", "R16")
@pytest.mark.parametrize("channel", _OUTER)
@pytest.mark.parametrize("where", ["enter", "body", "exit"])
def test_what_was_begun_is_left_once_after_an_error(channel: str, where: str) -> None:
    log: list[str] = []
    hooks = PipelineHooks()
    for each in CHANNELS:
        hooks.register(each, Noting(log, each, "a"))
        if each == channel and where != "body":
            parts = {"before" if where == "enter" else "after": go_wrong}
            hooks.register(each, HookContext.from_callable(**parts))
        hooks.register(each, Noting(log, each, "b"))
    teller = Teller(_STARTS[channel], go_wrong) if where == "body" else Teller()
    error_log: list[BaseException] = []
    teller.on_exception = error_log.append
    with pytest.raises(WrongError) as caught:
        make_trainer(hooks, teller).fit(Linear(), Numbers(3))
    assert error_log == [caught.value]
    assert hooks.trainer.exit_code == 1

    expected = {
        "enter": _left(channel, "a"),
        "body": _left(channel),
        "exit": [*_left(channel, "a", ""), *_left(channel, "b")],
    }[where]
    for outer in reversed(_OUTER[channel]):
        expected += _left(outer)
    assert log[-len(expected) :] == expected
    count = {name: sum(entry.startswith(name) for entry in log) for name in set(log)}
    assert all(count[entry] == 1 for entry in expected if entry.startswith("loop"))
    begun = [entry for entry in log if entry.endswith("(")]
    left = [entry for entry in log if not entry.endswith("(")]
    assert sorted(entry[:-1] for entry in begun) == sorted(entry.split(")")[0] for entry in left)


def watch(values: Callable[[Context], Any], *channels: str) -> tuple[PipelineHooks, dict[str, Any]]:
    """Return a set that notes values in channels, by ``name(`` and ``name)``."""
    hooks, seen = PipelineHooks("watch"), {}

    def note(key: str) -> Callable[[Context], None]:
        seen[key] = []
        return lambda ctx: seen[key].append(values(ctx))

    for channel in channels:
        name = short(channel)
        hooks.register(channel, HookContext.from_callable(note(f"{name}("), note(f"{name})")))
    return hooks, seen


@pytest.mark.shows("R44")
def test_a_restart_is_told_in_the_scopes_that_it_enters_again(tmp_path: Path) -> None:
    hooks, seen = watch(
        lambda ctx: (ctx.epoch_id, ctx.start_epoch, ctx.start_step, ctx.resumed),
        *("on_loop", "on_epoch", "on_step"),
    )
    for total in (2, 5):
        options = {"chkpt_root": tmp_path, "chkpt_frequency": 100, "total_steps": total}
        make_trainer(hooks, **options).fit(Linear(), Numbers(3))
    assert seen["loop("] == [(0, 0, 0, False), (0, 0, 2, True)]
    assert seen["epoch("] == [(0, 0, 0, False), (0, 0, 2, True), (1, 0, 2, False)]
    assert seen["step("] == seen["step)"]
    assert [row[-1] for row in seen["step("]] == [False] * 5


_IDS = {
    "epoch": (
        {"train_unit": "epoch", "total_steps": 2, "accumulation_steps": 3},
        [
            # epoch, step in it, step, batch in the epoch, batch, place in the window, boundary
            *((0, 0, 0, 0, 0, 0, False), (0, 0, 0, 1, 1, 1, False), (0, 0, 0, 2, 2, 2, True)),
            (0, 1, 1, 3, 3, 0, True),
            *((1, 0, 2, 0, 4, 0, False), (1, 0, 2, 1, 5, 1, False), (1, 0, 2, 2, 6, 2, True)),
            (1, 1, 3, 3, 7, 0, True),
        ],
        {"epoch)": [(0, 2, 2, 4), (1, 2, 4, 4)], "loop)": [(2, 0, 4, 0)]},
    ),
    "iteration": (
        {"total_steps": 3, "accumulation_steps": 3},
        [
            *((0, 0, 0, 0, 0, 0, False), (0, 0, 0, 1, 1, 1, False), (0, 0, 0, 2, 2, 2, True)),
            *((0, 1, 1, 3, 3, 0, False), (1, 0, 1, 0, 4, 1, False), (1, 0, 1, 1, 5, 2, True)),
            *((1, 1, 2, 2, 6, 0, False), (1, 1, 2, 3, 7, 1, False), (2, 0, 2, 0, 8, 2, True)),
        ],
        {"epoch)": [(0, 1, 1, 4), (1, 1, 2, 4), (2, 1, 3, 1)], "loop)": [(2, 1, 3, 1)]},
    ),
}


@pytest.mark.shows("R3", "R9", "R23", "R25", "C13")
@pytest.mark.parametrize("unit", _IDS)
def test_ids_count_from_zero_and_rise_after_the_ends(unit: str) -> None:

    def ids(ctx: Context) -> tuple[Any, ...]:
        return (
            *(ctx.epoch_id, ctx.step_id, ctx.global_step_id, ctx.micro_step_id),
            *(ctx.global_micro_step_id, ctx.window_index, ctx.is_optimizer_step_boundary),
        )

    options, expected, ends = _IDS[unit]
    hooks, seen = watch(ids, *CHANNELS)
    make_trainer(hooks, **options).fit(Linear(), Numbers(4))
    for name in ("batch(", "forward(", "forward)", "backward(", "backward)", "batch)"):
        assert seen[name] == expected, name
    for name in ("update(", "update)"):
        assert seen[name] == [row for row in expected if row[-1]], name
    is_cut = [row[-1] or row[3] == 3 for row in expected]
    assert len(seen["step("]) == len(seen["step)"]) == sum(is_cut)
    at_boundary = [row for row in seen["step)"] if row[-1]]
    assert at_boundary == seen["update)"]
    for name, rows in ends.items():
        assert [row[:4] for row in seen[name]] == rows, name
    assert seen["loop("][0][:6] == (0,) * 6


@pytest.mark.shows("R31")
def test_batch_hooks_see_the_raw_batch_and_forward_hooks_the_transformed_one() -> None:
    processor = BatchProcessor.from_callable(forward, transforms=[torch.neg, lambda x: x * 10])
    hooks, seen = watch(lambda ctx: ctx.batch.item(), "on_batch", "on_model_forward")
    trainer, model = make_trainer(hooks, total_steps=2, valid_frequency=2), Linear(processor)
    trainer.fit(model, Numbers(2, 1))
    trainer.predict(model, Numbers(2))
    assert seen["batch("] == seen["batch)"] == [1, 2, 1, 1, 2]
    assert seen["forward("] == seen["forward)"] == [-10, -20, -10, -10, -20]


@pytest.mark.shows("K23", "R7", "R23", "R27")
def test_the_end_of_forward_sees_outputs_and_loss_and_later_ends_do_too() -> None:
    """The loss without its graph; neither is left over for the next batch."""
    outputs: list[Tensor] = []

    def step(model: helios.Model, batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(model.net(batch))
        return outputs[-1], outputs[-1].square().mean()

    def values(ctx: Context) -> Any:
        if ctx.model_outputs is None:
            return ctx.loss
        assert ctx.model_outputs is outputs[-1]
        assert not ctx.loss.requires_grad
        return ctx.loss.item()

    hooks, seen = watch(values, *CHANNELS)
    trainer = make_trainer(hooks, total_steps=2, valid_frequency=2)
    trainer.fit(Linear(BatchProcessor.from_callable(step)), Numbers(2, 1))
    losses = [item.square().mean().item() for item in outputs]
    assert len(losses) == 3
    for name in ("forward)", "batch)"):
        assert seen[name] == losses, name
    for name in ("backward(", "backward)", "update(", "update)"):
        assert seen[name] == losses[:2], name
    for name in ("loop(", "epoch(", "step(", "batch(", "forward(", "step)", "epoch)", "loop)"):
        assert set(seen[name]) == {None}, name


@pytest.mark.shows("K20", "K23", "R8", "C10")
def test_gradients_and_weights_are_seen_where_they_belong() -> None:
    """Gradients from backward to the update; new weights at its end."""

    def values(ctx: Context) -> tuple[bool, float, float]:
        weight = ctx.model.net.weight
        return weight.grad is not None, weight.item(), ctx.optimizer.param_groups[0]["lr"]

    hooks, seen = watch(values, "on_step", "on_batch", "on_model_backward", "on_optimizer_step")
    make_trainer(hooks, total_steps=1).fit(Linear(), Numbers(1))
    (_, before, rate), (_, after, next_rate) = seen["step("][0], seen["step)"][0]
    assert before != after
    assert next_rate == rate / 2
    assert seen["backward("] == [(False, before, rate)]
    assert seen["backward)"] == seen["update("] == [(True, before, rate)]
    assert seen["update)"] == seen["batch)"] == seen["step)"] == [(False, after, next_rate)]


@pytest.mark.shows("R26", "R36")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_skipped_update_is_not_committed_and_moves_no_step(unit: str) -> None:
    """Step ids stay; the window begins anew; schedulers do not move."""

    def values(ctx: Context) -> tuple[Any, ...]:
        return (
            *(ctx.is_optimizer_step_committed, ctx.global_step_id, ctx.step_id),
            *(ctx.window_index, ctx.lr_scheduler.last_epoch),
        )

    hooks, seen = watch(values, "on_batch", "on_optimizer_step", "on_step")

    def skip(ctx: Context) -> None:
        if ctx.global_micro_step_id == 3:
            ctx.skip_step("as a test")

    hooks.register("on_optimizer_step", HookContext.from_callable(before=skip))
    options = {"train_unit": unit, "total_steps": 2 if unit == "iteration" else 1}
    make_trainer(hooks, **options, accumulation_steps=2).fit(Linear(), Numbers(6))
    assert seen["update("] == [(None, 0, 0, 1, 0), (True, 1, 1, 1, 1), (False, 1, 1, 1, 1)]
    assert seen["update)"] == [(True, 0, 0, 1, 1), (False, 1, 1, 1, 1), (True, 1, 1, 1, 2)]
    assert seen["step)"] == seen["update)"]
    assert [row[:4] for row in seen["batch("]] == [
        *((None, 0, 0, 0), (None, 0, 0, 1), (True, 1, 1, 0)),
        *((True, 1, 1, 1), (False, 1, 1, 0), (False, 1, 1, 1)),
    ]

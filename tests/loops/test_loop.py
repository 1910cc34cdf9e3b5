"""Loops: the order of a run, the tree of children, and the default innermost two."""

from __future__ import annotations

import importlib
from abc import ABCMeta
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.engines.engine import Engine
from helios.errors import ArgumentError, UsageError
from helios.loops.epoch import BatchLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.state import TrainingUnit
from tests.loops.parts import (
    EPOCH,
    ITERATION,
    Stepper,
    attached,
    make_parts,
    train_on,
)
from tests.support.quiet import Quiet


class Counted(Loop):
    """Advances three times and notes all calls; raises what it is told to, where it is told to."""

    def __init__(self, raises: dict[str, BaseException] | None = None) -> None:
        super().__init__()
        self.raises = raises or {}
        self.calls: list[tuple[Any, ...]] = []
        self.count = 0

    def note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raises:
            raise self.raises[name]

    @property
    def done(self) -> bool:
        return self.count >= 3

    def reset(self) -> None:
        self.count = 0
        self.note("reset")

    def on_run_start(self, *args: Any) -> None:
        self.note("on_run_start", *args)

    def on_advance_start(self, *args: Any) -> None:
        self.note("on_advance_start", *args)

    def advance(self, *args: Any) -> None:
        self.note("advance", *args)
        self.count += 1

    def on_advance_end(self) -> None:
        self.note("on_advance_end")

    def on_run_end(self) -> Any:
        self.note("on_run_end")
        return "the end"

    def teardown(self) -> None:
        self.note("teardown")
        super().teardown()


class Leaf(Counted):
    """A loop without children."""


class Middle(Leaf):
    roles = ("inner_loop",)

    def __init__(self, inner_loop: Loop | None = None) -> None:
        super().__init__()
        self.inner_loop = inner_loop


class Top(Leaf):
    roles = ("middle_loop", "side_loop")

    def __init__(self, middle_loop: Loop | None = None, side_loop: Loop | None = None) -> None:
        super().__init__()
        self.middle_loop = middle_loop
        self.side_loop = side_loop


@pytest.mark.shows("L2", "L6")
def test_a_run_resets_and_advances_until_it_is_done() -> None:
    """L2, L6: the ends take no arguments of the run, all others do."""
    loop = Counted()
    assert loop.run("a", 1) == "the end"
    rounds = [("on_advance_start", "a", 1), ("advance", "a", 1), ("on_advance_end",)]
    assert loop.calls == [("reset",), ("on_run_start", "a", 1), *rounds * 3, ("on_run_end",)]


@pytest.mark.shows("L3")
@pytest.mark.parametrize("place", ["on_advance_start", "advance", "on_advance_end"])
def test_stop_iteration_ends_a_loop_like_a_break(place: str) -> None:
    """L3: the end still runs, and its value is returned."""
    loop = Counted({place: StopIteration()})
    assert loop.run() == "the end"
    assert [name for name, *_ in loop.calls][-2:] == [place, "on_run_end"]


@pytest.mark.shows("L4")
@pytest.mark.parametrize("place", ["on_advance_start", "advance", "on_advance_end"])
def test_other_exceptions_leave_at_once(place: str) -> None:
    """L4: without the end."""
    loop = Counted({place: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert [name for name, *_ in loop.calls][-1] == place


@pytest.mark.shows("L42")
def test_a_subclass_changes_the_parts_of_a_run_and_never_the_run() -> None:
    kinds = [
        kind
        for module in ("epoch", "evaluation", "fit", "optimizer")
        for kind in vars(importlib.import_module(f"helios.loops.{module}")).values()
        if issubclass(type(kind), ABCMeta) and issubclass(kind, Loop)
    ]
    assert len(kinds) > 8
    assert {kind.run for kind in kinds} == {Loop.run}


@pytest.mark.shows("L5")
@pytest.mark.parametrize("missing", ["done", "advance"])
def test_a_loop_must_define_its_end_and_its_round(missing: str) -> None:
    """L5: `reset` has a default."""
    body = {"done": property(lambda self: True), "advance": lambda self: None}
    del body[missing]
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (Loop,), body)()
    complete = {"done": property(lambda self: True), "advance": lambda self: None}
    assert type("Complete", (Loop,), complete)().run() is None


@pytest.mark.shows("L7")
def test_a_session_is_seen_only_while_the_trainer_runs_the_loop() -> None:
    """L7, L8: the whole tree gets it, and loses it."""
    leaf, side = Leaf(), Leaf()
    top = Top(Middle(leaf), side)
    parts = make_parts(Stepper())
    with pytest.raises(AttributeError, match="session"):
        _ = top.session
    top._attach(parts)
    for loop in (top, top.middle_loop, leaf, side):
        assert loop is not None
        assert loop.session.context is parts.context
    top._attach(None)
    with pytest.raises(AttributeError, match="session"):
        _ = leaf.session


@pytest.mark.shows("L11", "L12")
def test_a_new_child_keeps_the_children_of_the_old_one() -> None:
    """L11, L12: a replaced loop must not lose what lies below it."""
    leaf = Leaf()
    top = Top(Middle(leaf), Leaf())
    new = Middle()
    top.connect(middle_loop=new)
    assert new.inner_loop is leaf


@pytest.mark.shows("L10")
def test_an_unknown_role_is_an_error_that_names_those_there_are() -> None:
    """L10: a ValueError; a leaf has none."""
    with pytest.raises(ArgumentError, match=r"must name one of its roles.*got 'midle_loop'") as hit:
        Top().connect(midle_loop=Leaf())
    assert "['middle_loop', 'side_loop']" in str(hit.value)
    with pytest.raises(ArgumentError, match=r"Leaf\.connect.*roles \[\], got 'inner_loop'"):
        Leaf().connect(inner_loop=Leaf())
    with pytest.raises(ArgumentError, match=r"connect\(side_loop=\.\.\.\) must be a Loop instance"):
        Top().connect(side_loop=Leaf)  # type: ignore[arg-type]


class Watcher(Quiet):
    """Notes weight, gradient and learning rate at every event of a step."""

    def __init__(self, model: Stepper) -> None:
        super().__init__("watcher")
        self.model = model
        self.seen: list[tuple[Any, ...]] = []

    def note(self, event: str, *args: Any) -> None:
        rate = self.model.optimizer.param_groups[0]["lr"]
        self.seen.append((event, *args, self.model.weight, self.model.gradient, rate))

    def on_backward_start(self, loss: Tensor) -> None:
        self.note("backward", loss.item())

    def on_backward_end(self) -> None:
        self.note("backward done")

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        assert optimizer is self.model.optimizer
        self.note("step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("zero_grad")

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        self.note("step done", committed)


@pytest.mark.shows("K19", "K20", "K21", "R38", "R39", "C10", "E25")
def test_a_returned_loss_is_stepped_in_the_published_order() -> None:
    """C10, C12, L25, R39: the event of the step sees gradients that are final, not yet clipped."""
    model = Stepper()
    watcher = Watcher(model)
    parts = make_parts(model, watcher, engine=Engine(torch.device("cpu"), clip_value=3.0))
    assert train_on(attached(OptimizerLoop(), parts), parts, 4.0) is True
    assert watcher.seen == [
        ("backward", 0.0, 0.0, None, 1.0),
        ("backward done", 0.0, 4.0, 1.0),
        ("step", 0.0, 4.0, 1.0),
        ("zero_grad", -3.0, 3.0, 0.5),
        ("step done", True, -3.0, None, 0.5),
    ]
    assert parts.run.is_manual is False


@pytest.mark.shows("L25")
@pytest.mark.parametrize(
    "answer",
    [
        lambda weight, batch: (weight * batch).sum(),
        lambda weight, batch: weight * batch,
        lambda weight, batch: {"loss": (weight * batch).sum(), "more": "anything"},
    ],
)
def test_a_loss_may_stand_in_a_dict_or_have_one_element(answer: Any) -> None:
    model = Stepper(answer)
    parts = make_parts(model)
    train_on(attached(OptimizerLoop(), parts), parts, 2.0)
    assert model.weight == -2.0


@pytest.mark.shows("L26", "C12")
def test_none_means_that_the_model_steps_itself() -> None:
    """C12, L26: nothing is touched, no event of an automatic step is told."""
    model = Stepper(lambda weight, batch: None)
    watcher = Watcher(model)
    parts = make_parts(model, watcher)
    assert train_on(attached(OptimizerLoop(), parts), parts, 2.0) is True
    assert parts.run.is_manual is True
    assert (watcher.seen, model.loss_items) == ([], {})
    assert (model.weight, model.scheduler.last_epoch) == (0.0, 0)


@pytest.mark.shows("L25")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (3.0, "got float"),
        ({"losses": torch.ones(())}, "got a dict of 'losses'. Add"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\)"),
        (torch.ones(()), "requires_grad=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_any_other_answer_is_an_error_that_says_what_is_expected(answer: Any, words: str) -> None:
    parts = make_parts(Stepper(lambda weight, batch: answer))
    loop = attached(OptimizerLoop(), parts)
    with pytest.raises(UsageError, match="train_step must return a scalar loss.*" + words):
        train_on(loop, parts, 2.0)


@pytest.mark.shows("L26", "C12")
@pytest.mark.parametrize("is_manual", [True, False])
def test_a_model_keeps_to_one_way_of_stepping(is_manual: bool) -> None:
    """C12: else a window would be neither ours nor the model's."""
    model = Stepper()
    answers = [lambda weight, batch: (weight * batch).sum(), lambda weight, batch: None]
    parts = make_parts(model)
    loop = attached(OptimizerLoop(), parts)
    model.answer = answers[is_manual]
    train_on(loop, parts, 2.0)
    model.answer = answers[not is_manual]
    form = "returned a loss after.*returned None" if is_manual else "returned None after.*a loss"
    with pytest.raises(UsageError, match=r"Stepper\.train_step " + form):
        train_on(loop, parts, 2.0)


def test_a_step_with_a_loss_needs_an_optimizer() -> None:
    model = Stepper()
    del model.scheduler, model.optimizer
    parts = make_parts(model)
    loop = attached(OptimizerLoop(), parts)
    with pytest.raises(UsageError, match=r"must have an optimizer.*found none"):
        train_on(loop, parts, 2.0)


@pytest.mark.shows("R26")
@pytest.mark.parametrize("unit", [EPOCH, ITERATION])
def test_an_update_that_a_hook_leaves_out_is_withdrawn(unit: TrainingUnit) -> None:
    """E26: gradients are thrown away, schedulers stay; steps are taken back where they count."""
    model = Stepper()
    watcher = Watcher(model)
    parts = make_parts(model, watcher, unit=unit)
    loop = attached(OptimizerLoop(), parts)
    parts.run.is_window_open = True
    parts.context.skip_step("test")
    assert train_on(loop, parts, 2.0) is False
    assert [event for event, *_ in watcher.seen][-2:] == ["zero_grad", "step done"]
    assert (model.weight, model.gradient, model.scheduler.last_epoch) == (0.0, None, 0)
    assert parts.run.state.current_iteration == (1 if unit is EPOCH else 0)
    assert parts.context.is_optimizer_step_committed is False
    assert train_on(loop, parts, 2.0) is True
    assert (model.weight, model.scheduler.last_epoch) == (-2.0, 1)


@pytest.mark.shows("L30")
@pytest.mark.parametrize("place", ["train_step", "batch_to_device", "process_training_batch"])
def test_stop_iteration_of_user_code_is_an_error(place: str) -> None:
    """`next()` on an exhausted iterator would drop the batch in silence."""

    def exhausted(*args: Any) -> Any:
        return next(iter(()))

    model = Stepper()
    kind = type("Owner", (Watcher,), {"process_training_batch": exhausted})
    plugins = [kind(model)] if place == "process_training_batch" else []
    if place != "process_training_batch":
        model = type("Broken", (Stepper,), {place: exhausted})()
    parts = make_parts(model, *plugins)
    loop = attached(BatchLoop(OptimizerLoop()), parts)
    with pytest.raises(RuntimeError, match="StopIteration"):
        train_on(loop, parts, 2.0)

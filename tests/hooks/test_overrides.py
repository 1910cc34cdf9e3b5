"""What users override in loops, engines and models is checked before it is called."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from helios.engines.engine import Engine
from helios.errors import ArgumentTypeError, UsageError
from helios.loops.batch import BatchLoop
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.plugins.plugin import Plugin
from helios.session import Session
from helios.state import Phase
from tests.loops.sessions import ListSource, Stepper, fit, make_session


def nothing(self: Any) -> None: ...


def with_batch(self: Any, batch: Any) -> None: ...


def with_optimizer(self: Any, optimizer: Any) -> None: ...


def start(*loops: Loop, engine: Engine | None = None, plugins: tuple[Plugin, ...] = ()) -> Session:
    """Train one step; loops take the places for which their classes were made."""
    sources: Any = {Phase.TRAINING: [ListSource([[1.0]])]}
    session = make_session(Stepper(), *plugins, engine=engine, sources=sources, total_steps=1)
    tree = FitLoop(EpochLoop(BatchLoop(OptimizerLoop()), ValidationLoop()))
    for loop in loops:
        batch_loop: Any = tree.epoch_loop.batch_loop  # type: ignore[union-attr]
        if isinstance(loop, BatchLoop):
            tree.epoch_loop.connect(batch_loop=loop)  # type: ignore[union-attr]
        else:
            batch_loop.connect(optimizer_loop=loop)
    fit(session, tree)
    return session


def make(base: type, **members: Any) -> Any:
    return type(f"Own{base.__name__}", (base,), members)


@pytest.mark.shows("L47")
@pytest.mark.parametrize(
    ("base", "name", "method", "wanted"),
    [
        (OptimizerLoop, "advance", nothing, "(self, batch)"),
        (OptimizerLoop, "on_run_start", nothing, "(self, batch)"),
        (OptimizerLoop, "update", nothing, "(self, optimizer)"),
        (OptimizerLoop, "forward", nothing, "(self, batch)"),
        (OptimizerLoop, "reset", with_batch, "(self)"),
        (BatchLoop, "advance", nothing, "(self, batch)"),
        (BatchLoop, "prepare", nothing, "(self, batch)"),
    ],
)
def test_a_loop_whose_method_takes_something_else_is_refused_at_the_start(
    base: Any, name: str, method: Any, wanted: str
) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        start(make(base, **{name: method})())
    assert str(caught.value).startswith(f"Own{base.__name__}.{name} must take {wanted}, but takes")


def test_a_loop_of_another_base_must_take_what_its_parent_passes() -> None:
    raw = make(Loop, advance=nothing, done=property(lambda self: True))
    with pytest.raises(ArgumentTypeError, match=r"OwnLoop\.advance must take \(self, batch\)"):
        start(raw())


def test_a_child_of_a_loop_of_the_users_may_take_what_that_one_passes() -> None:
    class Parent(BatchLoop):
        def advance(self, batch: Any) -> None:
            self.optimizer_loop.run(self.prepare(batch), 2)

        @property
        def done(self) -> bool:
            return self.session.context.loss is not None

    class Child(OptimizerLoop):
        def advance(self, batch: Any, factor: int) -> None:  # type: ignore[override]
            super().advance(batch * factor)

    session = start(Parent(), Child())
    assert session.model.weight == -2.0  # type: ignore[attr-defined]


@pytest.mark.shows("K45")
@pytest.mark.parametrize(("base", "name"), [(BatchLoop, "unsaved"), (Engine, "unsaved")])
def test_a_method_in_the_place_of_an_attribute_is_refused(base: Any, name: str) -> None:
    owner = make(base, **{name: nothing})
    with pytest.raises(ArgumentTypeError, match=rf"\.{name} must be an attribute, got a method"):
        start(engine=owner("cpu")) if base is Engine else start(owner())


class Choosy(BatchLoop):
    """Leaves out batches that are negative."""

    def advance(self, batch: Any) -> None:
        if batch > 0:
            super().advance(batch)
        else:
            self.is_over = True

    @property
    def done(self) -> bool:
        return super().done or self.is_over

    def reset(self) -> None:
        super().reset()
        self.is_over = False


class Halving(Plugin):
    def __init__(self) -> None:
        super().__init__("halving")

    def setup(self) -> None: ...

    def process_training_batch(self, batch: Any, state: Any) -> Any:
        return batch / 2


def test_a_batch_loop_may_leave_out_a_batch_that_hooks_would_map() -> None:
    sources: Any = {Phase.TRAINING: [ListSource([[2.0], [-1.0], [4.0]])]}
    session = make_session(Stepper(), Halving(), sources=sources, total_steps=3)
    fit(session, FitLoop(EpochLoop(Choosy(OptimizerLoop()), ValidationLoop())))
    assert session.state.global_iteration == 3
    assert session.model.weight == -2.0  # type: ignore[attr-defined]


@pytest.mark.shows("L47")
@pytest.mark.parametrize(
    ("name", "method", "wanted"),
    [
        ("clip_gradients", nothing, "(self, optimizer)"),
        ("optimizer_step", nothing, "(self, optimizer)"),
        ("backward_loss", with_batch, "(self, loss, inputs)"),
        ("zero_grad", nothing, "(self, optimizer)"),
    ],
)
def test_an_engine_whose_method_takes_something_else_is_refused_at_the_start(
    name: str, method: Any, wanted: str
) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        make_session(Stepper(), engine=make(Engine, **{name: method})("cpu"))
    assert str(caught.value).startswith(f"OwnEngine.{name} must take {wanted}, but takes")


@pytest.mark.shows("L47")
@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (OptimizerLoop, "on_advance_strat", "on_advance_start"),
        (OptimizerLoop, "updat", "update"),
        (BatchLoop, "prepair", "prepare"),
        (Engine, "clip_gradient", "clip_gradients"),
        (Engine, "on_training_batch_strat", "on_training_batch_start"),
    ],
)
def test_a_name_that_is_almost_one_of_ours_is_named(
    base: Any, name: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = make(base, **{name: with_batch, "_updat": nothing, "helper": nothing})
    with caplog.at_level(logging.WARNING):
        start(engine=owner("cpu")) if base is Engine else start(owner())
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"Own{base.__name__}.{name} is never called by Helios; did you mean ")
    assert f"mean {meant}?" in text


def test_what_an_engine_receives_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    start(engine=make(Engine, on_training_epoch_start=with_batch)("cpu"))
    assert not caplog.records


class Mapping(Plugin):
    def __init__(self) -> None:
        super().__init__("mapping")

    def setup(self) -> None: ...

    def process_training_batch(self, batch: Any, state: Any) -> Any:
        batch + 1


@pytest.mark.shows("K44")
def test_a_plugin_that_maps_a_batch_to_nothing_is_named() -> None:
    match = (
        r"process_training_batch of plugin 'mapping' \(Mapping\) must return the batch, got None"
    )
    with pytest.raises(UsageError, match=match):
        start(plugins=(Mapping(),))

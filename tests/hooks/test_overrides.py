"""What users override in loops, engines and models is checked before it is called."""

from __future__ import annotations

from typing import Any

import pytest

from helios.engines.engine import Engine
from helios.errors import ArgumentTypeError, UsageError
from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.plugins.plugin import Plugin
from helios.run_parts import RunParts
from helios.state import Phase
from tests.loops.parts import ListSource, Stepper, fit, make_parts
from tests.support.quiet import Quiet


def nothing(self: Any) -> None: ...


def start(*loops: Loop, engine: Engine | None = None, plugins: tuple[Plugin, ...] = ()) -> RunParts:
    """Train one step; loops take the places for which their classes were made."""
    sources: Any = {Phase.TRAINING: [ListSource([[1.0]])]}
    parts = make_parts(Stepper(), *plugins, engine=engine, sources=sources, total_steps=1)
    tree = FitLoop(EpochLoop(BatchLoop(OptimizerLoop()), ValidationLoop()))
    for loop in loops:
        batch_loop: Any = tree.epoch_loop.batch_loop  # type: ignore[union-attr]
        if isinstance(loop, BatchLoop):
            tree.epoch_loop.connect(batch_loop=loop)  # type: ignore[union-attr]
        else:
            batch_loop.connect(optimizer_loop=loop)
    fit(parts, tree)
    return parts


def make(base: type, **members: Any) -> Any:
    return type(f"Own{base.__name__}", (base,), members)


@pytest.mark.shows("L47")
@pytest.mark.parametrize(
    ("base", "name", "method", "wanted"),
    [
        (OptimizerLoop, "advance", nothing, "(self, batch)"),
        (BatchLoop, "advance", nothing, "(self, batch)"),
    ],
)
def test_a_loop_whose_method_takes_something_else_is_refused_at_the_start(
    base: Any, name: str, method: Any, wanted: str
) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        start(make(base, **{name: method})())
    assert str(caught.value).startswith(f"Own{base.__name__}.{name} must take {wanted}, but takes")


class Mapping(Quiet):
    def process_training_batch(self, batch: Any, state: Any) -> Any:
        batch + 1


@pytest.mark.shows("K44")
def test_a_plugin_that_maps_a_batch_to_nothing_is_named() -> None:
    match = (
        r"process_training_batch of plugin 'mapping' \(Mapping\) must return the batch, got None"
    )
    with pytest.raises(UsageError, match=match):
        start(plugins=(Mapping(),))

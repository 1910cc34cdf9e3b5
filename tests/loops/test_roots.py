"""The four roots of the tree can be replaced (L1, L13)."""

from __future__ import annotations

from typing import Any

import pytest

import helios
from helios.errors import ArgumentTypeError
from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import PredictionLoop, TestingLoop, ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from tests.support.runs import IndexModule, Setting, SmallModel

_SETTING = Setting(total_steps=1)


def _trainer() -> helios.Trainer:
    return helios.Trainer("", "iteration", 2, 2, use_cpu=True, print_banner=False)


@pytest.mark.shows("L1", "L9", "L13")
def test_loops_are_replaced_at_every_level_at_once() -> None:
    """L9 to L12: each by its role; the whole tree is that of the new ones."""
    seen: list[str] = []

    def noting(base: type, name: str) -> Loop:
        def advance(self: Loop, *args: Any) -> None:
            seen.append(name)
            base.advance(self, *args)

        loop: Loop = type(f"Noting{base.__name__}", (base,), {"advance": advance})()
        return loop

    trainer = _trainer()
    below = trainer.fit_loop.epoch_loop
    trainer.fit_loop = noting(FitLoop, "fit")
    assert trainer.fit_loop.epoch_loop is below
    trainer.fit_loop.connect(epoch_loop=noting(EpochLoop, "epoch"))
    epochs = trainer.fit_loop.epoch_loop
    epochs.connect(
        batch_loop=noting(BatchLoop, "batch"), val_loop=noting(ValidationLoop, "validation")
    )
    epochs.batch_loop.connect(optimizer_loop=noting(OptimizerLoop, "optimizer"))
    trainer.fit(SmallModel(_SETTING), IndexModule(_SETTING))
    assert seen[:4] == ["fit", "epoch", "batch", "optimizer"]
    assert seen[4:7] == ["epoch", "batch", "optimizer"]
    # Two batches of validation, and the look that finds no third one.
    assert seen[7:] == ["validation"] * 3


@pytest.mark.shows("L1", "L13")
@pytest.mark.parametrize(
    ("call", "base"),
    [("validate", ValidationLoop), ("test", TestingLoop), ("predict", PredictionLoop)],
)
def test_an_evaluation_runs_the_loop_that_was_assigned(call: str, base: type) -> None:
    steps: list[int] = []

    def advance(self: object) -> None:
        steps.append(1)
        base.advance(self)

    trainer = _trainer()
    setattr(trainer, f"{call}_loop", type("Counting", (base,), {"advance": advance})())
    getattr(trainer, call)(SmallModel(_SETTING), IndexModule(_SETTING), checkpoint=None)
    assert len(steps) == 3


@pytest.mark.shows("L13")
def test_a_loop_of_another_kind_is_refused() -> None:
    trainer = _trainer()
    for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        with pytest.raises(ArgumentTypeError):
            setattr(trainer, name, object())
    with pytest.raises(ArgumentTypeError, match="prediction"):
        trainer.predict_loop = TestingLoop()

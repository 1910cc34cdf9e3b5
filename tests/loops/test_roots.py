"""The four roots of the tree can be replaced (L1, L13)."""

from __future__ import annotations

import pytest

import helios
from helios.errors import ArgumentTypeError
from helios.loops.evaluation import TestingLoop, ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.prediction import PredictionLoop
from tests.support.runs import IndexModule, Setting, SmallModel

_SETTING = Setting(total_steps=1)


def _trainer() -> helios.Trainer:
    return helios.Trainer("", "iteration", 2, use_cpu=True, print_banner=False)


def test_a_fit_loop_of_ones_own_keeps_the_tree_below_it() -> None:
    rounds: list[int] = []

    class Counting(FitLoop):
        def advance(self) -> None:
            rounds.append(self.session.cursor.epoch)
            super().advance()

    trainer = _trainer()
    below = trainer.fit_loop.epoch_loop
    trainer.fit_loop = Counting()
    assert trainer.fit_loop.epoch_loop is below
    trainer.fit(SmallModel(_SETTING), IndexModule(_SETTING))
    assert rounds == [0]


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
    getattr(trainer, call)(SmallModel(_SETTING), IndexModule(_SETTING))
    assert len(steps) == 3


def test_a_loop_of_another_kind_is_refused() -> None:
    trainer = _trainer()
    for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        with pytest.raises(ArgumentTypeError):
            setattr(trainer, name, object())
    with pytest.raises(ArgumentTypeError, match="prediction"):
        trainer.predict_loop = TestingLoop()

"""The log names the scores of each validation and the best ones; the end says what has happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helios import CheckpointStore, KeepBest, Trainer
from helios.best import BestRule, BestSoFar, Validation
from helios.listeners import Validated
from helios.start.run_log import ScoreLog, describe_end
from helios.state import TrainingState
from tests.typed.user_script import Line, Numbers

LOW = BestRule("error", "min")


def show(log: ScoreLog, best: BestSoFar, errors: Sequence[float], *, first: int = 1) -> None:
    """Show one validation per epoch of eight iterations."""
    for number, error in enumerate(errors, first):
        state = TrainingState(
            global_epoch=number,
            global_iteration=8 * number,
            global_step=8 * number,
            validation_cycles=number,
        )
        scores, losses = {"error": error, "hits": 3.0}, {"loss": 2.0}
        has_improved = error < 0.6
        best.judge(Validation(8 * number, scores), has_improved=has_improved)
        log.validated(Validated(scores, state, has_improved, best.best, losses))


@pytest.mark.shows("U26")
def test_each_validation_is_a_line_with_the_best_so_far(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log, so_far = ScoreLog(), BestSoFar(LOW)
    show(log, so_far, [0.5, 0.25, math.nan, 0.25, 0.125])
    best = "best: error 0.25 (iteration 16); training loss 2."
    new = "the best so far; training loss 2."
    assert caplog.messages == [
        f"Validation 1 (epoch 1, iteration 8): error 0.5, hits 3; {new}",
        f"Validation 2 (epoch 2, iteration 16): error 0.25, hits 3; {new}",
        f"Validation 3 (epoch 3, iteration 24): error nan, hits 3; {best}",
        f"Validation 4 (epoch 4, iteration 32): error 0.25, hits 3; {best}",
        f"Validation 5 (epoch 5, iteration 40): error 0.125, hits 3; {new}",
    ]
    last = {"last scores": "error 0.125, hits 3 (epoch 5, iteration 40)"}
    assert log.summarize(None) == last
    for name, text in {None: "", "a.pth": "; a.pth", "": "; without a checkpoint"}.items():
        found = log.summarize(so_far.best, name)
        assert found == {**last, "best scores": f"error 0.125 (iteration 40{text})"}


def say_end(
    state: TrainingState,
    seconds: float,
    begun_at: int,
    newest: Path | None,
    nonfinite: str,
    scores: Sequence[str],
) -> str:
    """Return what the log says at the end of a training."""
    run = SimpleNamespace(state=state, best=SimpleNamespace(best=None))
    training: Any = SimpleNamespace(
        parts=SimpleNamespace(
            run=run, loss_means=SimpleNamespace(nonfinite=nonfinite), recorders=scores
        ),
        saves=SimpleNamespace(writer=SimpleNamespace(wait=lambda: newest)),
        scores=SimpleNamespace(
            summarize=lambda *_: dict(zip(["last scores"], scores, strict=False))
        ),
        seconds=seconds,
        begun_at=begun_at,
    )
    return describe_end(training)


@pytest.mark.shows("U26")
def test_the_end_says_how_far_and_where() -> None:
    state = TrainingState(global_epoch=3, global_iteration=24, global_step=24)
    newest = Path("runs") / "line" / "line_epoch_3_iter_24.pth"
    text = say_end(state, 3723, 8, newest, "loss was nan (epoch 1, iteration 3)", ["error 1"])
    assert text.splitlines() == [
        "",
        "  trained      until epoch 3, iteration 24; this start: 16 iterations in 1:02:03",
        "  last scores  error 1",
        "  not finite   the first loss: loss was nan (epoch 1, iteration 3)",
        f"  checkpoints  {newest.parent} (newest: line_epoch_3_iter_24.pth)",
        f"  report       helios report {newest.parent}",
    ]
    bare = say_end(state, 3.21, 0, None, "", [])
    assert bare == "\n  trained  until epoch 3, iteration 24 in 3.2 s"


@pytest.mark.shows("U26")
def test_fit_logs_scores_and_the_end_also_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"valid_frequency": 1, "chkpt_frequency": 1, "chkpt_root": tmp_path}
    Trainer(total_steps=2, use_cpu=True, **options).fit(Line("line"), Numbers())
    shown = capfd.readouterr().err
    assert "Validation 1 (epoch 1, iteration 4): error " in shown
    assert "Validation 2 (epoch 2, iteration 8): error " in shown
    assert shown.count("\n  last scores  error ") == 1
    assert "best" not in shown, "nothing says which score is the best"
    highest = KeepBest(1, "error", "max")
    options |= {"store": CheckpointStore(keep_last=2, keep_best=highest)}
    Trainer(total_steps=3, use_cpu=True, **options).fit(Line("line"), Numbers())
    shown = capfd.readouterr().err
    assert "Validation 1" not in shown
    assert "Validation 3 (epoch 3, iteration 12): error " in shown
    assert "; the best so far; training loss " in shown
    assert "until epoch 3, iteration 12; this start: 4 iterations in " in shown
    assert f"  report       helios report {tmp_path / 'line'}\n" in shown


@pytest.mark.shows("U26")
def test_an_evaluation_logs_its_scores(capfd: pytest.CaptureFixture[str]) -> None:
    trainer, model = Trainer(total_steps=1, use_cpu=True), Line("line")
    trainer.fit(model, Numbers())
    trainer.validate(model, Numbers())
    assert f"Validation scores: error {model.metrics['error']:.4g}." in capfd.readouterr().err

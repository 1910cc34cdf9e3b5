"""The log names the scores of each validation and the best ones; the end says what has happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helios import CheckpointStore, KeepBest, Trainer
from tests.typed.user_script import Line, Numbers


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
def test_a_validation_logs_its_scores(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = Trainer(total_steps=1, use_cpu=True), Line("line")
    trainer.fit(model, Numbers())
    trainer.validate(model, Numbers())
    assert f"Validation scores: error {model.metrics['error']:.4g}." in capfd.readouterr().err
    monkeypatch.setattr(Line, "valid_step", lambda *args: None)
    Trainer(total_steps=1, valid_frequency=1, use_cpu=True).fit(model, Numbers())
    assert "Validation 1 (epoch 1, iteration 4): no scores; training" in capfd.readouterr().err

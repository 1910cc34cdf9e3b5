"""The log names the scores of each validation, and at the end the last and the best."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from helios import Trainer
from helios.startup.reporting.score_log import ScoreLog
from helios.state import TrainingState
from tests.typed.user_script import Line, Numbers


def test_each_validation_is_a_line_and_the_end_names_the_last_and_the_best(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = ScoreLog()
    for number, (error, has_improved) in enumerate([(0.5, True), (0.25, True), (0.75, False)], 1):
        state = TrainingState(
            global_epoch=number, global_iteration=8 * number, validation_cycles=number
        )
        log.show({"error": error, "hits": 3.0}, state, has_improved=has_improved)
    log.show_end()
    assert caplog.messages == [
        "Validation 1 (epoch 1, iteration 8): error 0.5, hits 3.",
        "Validation 2 (epoch 2, iteration 16): error 0.25, hits 3.",
        "Validation 3 (epoch 3, iteration 24): error 0.75, hits 3.",
        "Last validation: error 0.75, hits 3 (epoch 3, iteration 24). "
        "Best: error 0.25, hits 3 (epoch 2, iteration 16).",
    ]


def test_nothing_is_logged_without_scores(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ScoreLog()
    log.show({}, TrainingState(), has_improved=True)
    log.show_end()
    assert not caplog.messages


def test_fit_logs_them_also_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"valid_frequency": 1, "chkpt_frequency": 1, "chkpt_root": tmp_path}
    Trainer(total_steps=2, use_cpu=True, **options).fit(Line("line"), Numbers())
    shown = capfd.readouterr().err
    assert "Validation 1 (epoch 1, iteration 4): error " in shown
    assert "Validation 2 (epoch 2, iteration 8): error " in shown
    assert shown.count("Last validation: error ") == 1
    assert "Best:" not in shown, "a model that says nothing of improvements has no best one"
    Trainer(total_steps=3, use_cpu=True, **options).fit(Line("line"), Numbers())
    shown = capfd.readouterr().err
    assert "Validation 1" not in shown
    assert "Validation 3 (epoch 3, iteration 12): error " in shown

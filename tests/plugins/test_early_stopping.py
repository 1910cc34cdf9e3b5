"""Early stopping: when it ends a run, what it counts, and that a resume counts on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.plugins.averaging import EMA
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.monitors import GradientNormMonitor
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Setting, SmallModel, digest, train


class Scripted(SmallModel):
    """A model whose validations have the given scores, one after the other."""

    unsaved = (*SmallModel.unsaved, "scores")

    def __init__(self, setting: Setting, scores: Sequence[Any]) -> None:
        super().__init__(setting)
        self.scores = scores

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        if self.scores:
            self._val_scores["quality"] = self.scores[validation_cycle]


_SETTING = Setting(total_steps=20, valid_frequency=1, chkpt_frequency=1)


def fit(
    scores: Sequence[Any],
    *plugins: Plugin,
    setting: Setting = _SETTING,
    root: Path | None = None,
    sanity_steps: int = 0,
) -> helios.Trainer:
    trainer = helios.Trainer(
        sanity_steps=sanity_steps,
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        valid_frequency=setting.valid_frequency,
        chkpt_frequency=setting.chkpt_frequency if root else None,
        chkpt_root=root,
        random_seed=setting.seed,
        print_banner=False,
        use_cpu=True,
        plugins=plugins,
    )
    model = Scripted(setting, scores)
    trainer.fit(model, IndexModule(setting))
    trainer.validations = model.seen  # type: ignore[attr-defined]
    return trainer


def count(trainer: helios.Trainer) -> int:
    return len(trainer.validations)  # type: ignore[attr-defined]


def reason(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if "has ended: " in line]
    return lines[-1].partition("has ended: ")[2]


_DOWN = [9.0, 8.0, 8.0, 7.0, 7.5, 7.4, 7.3, 1.0, 1.0]


@pytest.mark.parametrize(
    ("scores", "options", "validations", "text"),
    [
        (_DOWN, {"patience": 1}, 3, "not improved on 8.0 in 1 validations (patience 1)."),
        (_DOWN, {"patience": 3, "min_delta": 2}, 4, "on 9.0 in 3 validations (patience 3)."),
        (_DOWN, {"patience": 9, "threshold": 7.4}, 4, "has reached 7.0 (threshold 7.4)."),
        ([-x for x in _DOWN], {"patience": 2, "mode": "max"}, 6, "improved on -7.0 in 2"),
        (
            [torch.tensor([3.0]), torch.tensor(2), 3],
            {"patience": 1},
            3,
            "early-stopping: quality has not improved on 2.0 in 1 validations",
        ),
    ],
)
def test_the_run_ends_when_patience_is_out(
    scores: list[Any],
    options: dict[str, Any],
    validations: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unit = "iteration" if "mode" in options else "epoch"
    trainer = fit(
        scores,
        EarlyStopping("quality", **{"mode": "min", **options}),
        setting=dataclasses.replace(_SETTING, unit=unit, total_steps=9),
    )
    assert count(trainer) == validations
    assert text in reason(capsys)
    assert trainer.exit_code == 0


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_is_no_improvement(
    bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = EarlyStopping("quality", mode="min", patience=2)
    trainer = fit([bad, 3.0, bad, bad, 1.0], stopping)
    assert count(trainer) == 4
    assert stopping.best == 3.0
    said = capsys.readouterr().err
    assert said.count(f"'quality' is {bad}: plugin 'early-stopping' counts it as no impr") == 3
    assert "improved on 3.0 in 2 validations (patience 2)" in said


def test_a_missing_score_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"metric='qualty'.*scores are: quality, score"):
        fit(_DOWN, EarlyStopping("qualty", mode="min", patience=2))


def test_an_extended_run_that_was_ended_gets_its_patience_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [5.0, 6.0, 6.0, 6.0, 4.0, 6.0, 6.0, 6.0]
    assert count(fit(scores, EarlyStopping("quality", mode="min", patience=2), root=tmp_path)) == 3
    fit(scores, EarlyStopping("quality", mode="min", patience=2), root=tmp_path)
    assert "Raise total_steps to continue it" in capsys.readouterr().err
    longer = dataclasses.replace(_SETTING, total_steps=30)
    stopping = EarlyStopping("quality", mode="min", patience=2)
    extended = fit(scores, stopping, setting=longer, root=tmp_path)
    assert count(extended) == 7
    assert "patience starts over" in capsys.readouterr().err
    assert (stopping.best, stopping.count) == (4.0, 2)


_ALL: dict[str, dict[str, Any]] = {
    "steps": {"total_steps": 30},
    "steps, accumulated": {"total_steps": 30, "accumulation": 2, "valid_frequency": 2},
    "inside of epochs": {
        "unit": "epoch",
        "total_steps": 4,
        "valid_frequency": 1,
        "accumulation": 2,
        "requests": True,
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _ALL)
def test_a_run_with_three_plugins_that_have_state_resumes_everywhere(
    name: str, tmp_path: Path
) -> None:
    setting = Setting(**_ALL[name], print_frequency=1)

    def run(folder: Path) -> Any:
        stopping = EarlyStopping("score", mode="min", patience=2)
        return train(folder, setting, EMA(0.7), stopping, GradientNormMonitor())

    resume_everywhere(run, tmp_path)
    states = {
        folder.name: helios.load_checkpoint(helios.find_last_checkpoint(folder / "small"))
        for folder in tmp_path.iterdir()
    }
    plugins = states["whole"]["plugins"]
    assert {digest(state["plugins"]) for state in states.values()} == {digest(plugins)}
    assert plugins["early-stopping"]["best"] is not None
    assert states["whole"]["cursor"]["stop_reason"].startswith("early-stopping: score has not")

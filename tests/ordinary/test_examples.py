"""The scripts of docs/examples, for one epoch: they train, save and score."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import helios

_EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.mark.parametrize(
    ("script", "least", "most"),
    [
        ("digits", 0.3, 1.0),
        pytest.param("character_model", 2.0, 4.0, marks=pytest.mark.full),
    ],
)
def test_an_example_trains_and_scores(
    script: str, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    score = runpy.run_path(str(_EXAMPLES / f"{script}.py"))["main"](max_epochs=1)
    assert least < score < most
    (run,) = (tmp_path / "runs").iterdir()
    checkpoint = helios.find_last_checkpoint(run)
    assert checkpoint is not None
    assert "_epoch_1_" in checkpoint.name

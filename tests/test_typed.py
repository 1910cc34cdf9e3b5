"""A user's script with types passes strict checkers, and does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT
from tests.typed import user_script

SCRIPT = ROOT / "tests" / "typed" / "user_script.py"
WRONG = """
from helios import Model, Plugin, Trainer, TrainingState

class Wrong(Plugin):
    def on_training_step_end(self, state: TrainingState, committed: str) -> None: ...

Trainer(on_incomplete="rise")
Trainer(seeds={"oder": 1})
"""


def check(command: list[str], folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", *command, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(params=["mypy", "basedpyright"])
def checker(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Return the command of a strict type checker that finds this checkout."""
    if request.param == "mypy":
        settings = f"[mypy]\nstrict = true\nmypy_path = {ROOT}\ncache_dir = {ROOT}/.mypy_cache\n"
        (tmp_path / "mypy.ini").write_text(settings)
        return ["mypy"]
    settings = '{"typeCheckingMode": "strict", "extraPaths": ["%s"]}' % ROOT  # noqa: UP031
    (tmp_path / "pyrightconfig.json").write_text(settings)
    return ["basedpyright", "--pythonpath", sys.executable]


def test_a_script_of_a_user_passes(checker: list[str], tmp_path: Path) -> None:
    done = check(checker, tmp_path, SCRIPT.read_text("utf-8"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_signature_and_a_wrong_choice_are_seen(checker: list[str], tmp_path: Path) -> None:
    done = check(checker, tmp_path, WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "on_training_step_end" in done.stdout
    assert "on_incomplete" in done.stdout
    assert "script.py:8" in done.stdout


def test_the_script_runs(tmp_path: Path) -> None:
    watch, model = user_script.train(str(tmp_path))
    assert len(watch.losses) == 8
    assert watch.rates == [1e-3] * 8
    assert watch.is_first
    assert model.metrics.keys() == {"error"}
    assert "clip_norm" in str(user_script.refuse())

"""Users' scripts with types pass strict checkers, and do what they say.

``scripts/check`` runs the checkers on both scripts as they stand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helios import Model, Trainer
from helios.hooks.events import EVENTS, Receiver
from tests.codebase import ROOT
from tests.typed import (
    extending_script,
    published_members,
    short_script,
    user_script,
)

SCRIPT = ROOT / "tests" / "typed" / "user_script.py"
EXTENDING = ROOT / "tests" / "typed" / "extending_script.py"
SHORT = ROOT / "tests" / "typed" / "short_script.py"
MEMBERS = ROOT / "tests" / "typed" / "published_members.py"
# Assigned in the constructor of a trainer, and listed in its docstring.
ATTRIBUTES = {"model", "datamodule", "plugins", "train_exceptions", "test_exceptions"}
# Public for the house only.
OF_THE_HOUSE = {"discovery", "tables"}
WRONG = """
from helios import Model, Plugin, Trainer, TrainingState

class Wrong(Plugin):
    def on_training_step_end(self, state: TrainingState, committed: str) -> None: ...

Trainer(on_incomplete="rise")

Trainer().fit_loop.epoch_loop.connect(bach_loop=None)

class Reading(Plugin[Model]):
    def setup(self) -> None:
        print(self.context.model.network)
"""


CONFIGURATION = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}


def run_checker(checker: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Check all scripts of a folder; mypy as scripts/check does, whose cache it shares."""
    files = sorted(map(str, folder.glob("*.py")))
    (folder / "pyrightconfig.json").write_text(json.dumps(CONFIGURATION))
    python = ["--pythonpath", sys.executable] if checker == "basedpyright" else []
    return subprocess.run(
        [sys.executable, "-m", checker, *python, *files],
        cwd=ROOT if checker == "mypy" else folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_script_of_a_user_passes_and_a_wrong_signature_and_choice_are_seen(
    checker: str, tmp_path: Path
) -> None:
    (tmp_path / "right.py").write_text(SCRIPT.read_text("utf-8"))
    (tmp_path / "right_extending.py").write_text(EXTENDING.read_text("utf-8"))
    (tmp_path / "right_short.py").write_text(SHORT.read_text("utf-8"))
    (tmp_path / "wrong.py").write_text(WRONG)
    done = run_checker(checker, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "right" not in done.stdout.replace("basedpyright", "")
    assert "on_training_step_end" in done.stdout
    assert "on_incomplete" in done.stdout
    assert "wrong.py:7" in done.stdout
    assert "wrong.py:9" in done.stdout
    assert "network" in done.stdout


def test_the_script_runs(tmp_path: Path) -> None:
    watch, model = user_script.train(str(tmp_path))
    assert len(watch.losses) == 8
    assert watch.rates == [1e-3] * 8
    assert watch.is_first
    assert model.metrics.keys() == {"error"}
    assert "clip_norm" in str(user_script.refuse())


def test_the_script_that_extends_runs() -> None:
    assert extending_script.train() == 8


def test_the_short_script_runs() -> None:
    model, predictions = short_script.train()
    assert model.metrics.keys() == model.test_scores.keys() == {"error"}
    assert len(predictions) == 4


def test_the_script_of_published_members_names_all_of_them_and_runs(tmp_path: Path) -> None:
    read = {
        owner: set(re.findall(rf"\b{owner}\.(\w+)", MEMBERS.read_text("utf-8")))
        for owner in ("model", "trainer")
    }
    published = {
        owner: {name for name in dir(kind) if not name.startswith("_")}
        for owner, kind in (("model", Model), ("trainer", Trainer))
    }
    assert published["trainer"] | ATTRIBUTES <= read["trainer"]
    of_others = {each.name for each in EVENTS.values() if Receiver.MODEL not in each.receivers}
    assert published["model"] - OF_THE_HOUSE - of_others <= read["model"]
    assert published_members.read_all(tmp_path).is_equal

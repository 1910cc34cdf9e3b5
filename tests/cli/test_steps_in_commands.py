"""Commands name iterations, as files do, with the optimizer step beside them if it is another."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helios import CheckpointStore, KeepBest
from helios.cli import main
from helios.ledger import diff
from tests.ledger.test_validation_scores import Data, Net, make_trainer, train

# Two batches are a step: steps 2, 4 and 6 are validated, step 3 is saved.
STEPS = {"total_steps": 6, "valid_frequency": 2, "chkpt_frequency": 3, "accumulation_steps": 2}
STORE = CheckpointStore(keep_best=KeepBest(1, metric="error", mode="min"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), store=STORE, **STEPS)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with other targets in its validations."""
    return train(tmp_path_factory.mktemp("shifted"), data=Data(0.5), store=STORE, **STEPS)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs a command, and returns what it prints."""

    def run_command(*words: object) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    return run_command


@pytest.mark.shows("P133")
def test_commands_show_the_step_beside_an_iteration(
    run: Path, say: Callable[..., str], tmp_path: Path
) -> None:
    newest = max(run.glob("*.pth"), key=lambda path: path.stat().st_mtime_ns)
    listed = say("ls", run)
    assert "12 (step 6)" in listed
    assert "(iteration 12 (step 6))" in listed.partition("best: ")[2]
    inspected = say("inspect", newest)
    assert re.search("^iteration +12$", inspected, re.MULTILINE)
    assert re.search("^step +6$", inspected, re.MULTILINE)
    document = json.loads(say("ls", run, "--json"))
    files = document["folders"][0]["files"]
    assert (files[-1]["place"], files[-1]["sidecar"]["step"]) == ([2, 12], 6)
    assert document["folders"][0]["best"]["step"] == 6
    report = json.loads(say("report", run, "--out", tmp_path / "report.html", "--json"))
    assert report["summary"]["Iterations"].startswith("12 (step 6)")
    assert "(iteration 12 (step 6))" in report["summary"]["Best validation"]


def test_comparisons_show_the_step_beside_an_iteration(
    run: Path, shifted: Path, say: Callable[..., str], tmp_path: Path
) -> None:
    assert "equal: iterations 1 to 12 (step 6)" in say("diff", run, run)
    assert "they differ at the latest from iteration 4 (step 2) on" in say("diff", run, shifted)
    assert diff(run, shifted).steps["iteration"] == 2
    faster = train(tmp_path, Net(rate=0.2), store=STORE, **STEPS)
    assert "different from iteration 1 (step 0) on" in say("diff", run, faster)
    short = train(tmp_path / "short", **STEPS | {"total_steps": 4})
    assert "equal up to iteration 8 (step 4)" in say("diff", run, short)


def test_verify_shows_the_step_beside_an_iteration(
    run: Path, say: Callable[..., str], tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    ledger = copy / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(line for line in lines if b"[2,9," not in line))
    assert "after iteration 8 (step 4)" in say("verify", ledger)


def test_a_replay_shows_the_step_beside_an_iteration(run: Path) -> None:
    trainer = make_trainer(run.parent, store=STORE, **STEPS)
    found = trainer.replay(Net(), Data())
    assert (found.num_equal, found.steps["num_equal"]) == (12, 6)


def test_equal_numbers_are_shown_once(say: Callable[..., str], tmp_path: Path) -> None:
    run = train(tmp_path, store=STORE, total_steps=4)
    assert "(step" not in say("ls", run)
    assert "(step" not in say("diff", run, run)

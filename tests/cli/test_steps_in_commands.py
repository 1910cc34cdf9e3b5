"""Commands name iterations, as files do, with the optimizer step beside them if it is another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helios import CheckpointStore, KeepBest
from helios.cli import main
from tests.ledger.test_validation_scores import train

# Two batches are a step: steps 2, 4 and 6 are validated, step 3 is saved.
STEPS = {"total_steps": 6, "valid_frequency": 2, "chkpt_frequency": 3, "accumulation_steps": 2}
STORE = CheckpointStore(keep_best=KeepBest(1, metric="error", mode="min"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), store=STORE, **STEPS)


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

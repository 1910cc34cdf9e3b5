"""A setup that goes through a set orders parameters anew at each start; a resume does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _start(folder: Path, seed: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.shuffled_script", str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["parameters"],
        ["groups"],
        ["networks"],
        pytest.param(["groups", "--nproc", "2"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_moments_follow_their_parameters_whatever_order_a_set_has(
    arguments: list[str], tmp_path: Path
) -> None:
    whole = _start(tmp_path / "whole", 0, *arguments)
    assert whole.returncode == 0, whole.stderr
    killed = _start(tmp_path / "killed", 0, *arguments, "--kill", "5")
    assert killed.returncode in (-signal.SIGKILL, 1), killed.stderr
    resumed = _start(tmp_path / "killed", 1, *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[0] != whole.stdout.splitlines()[0], "seeds must shuffle"
    assert resumed.stdout.splitlines()[1:] == whole.stdout.splitlines()[1:]

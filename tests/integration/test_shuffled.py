"""A setup that goes through a set orders parameters anew at each start; a resume does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import shuffled_script
from tests.support.scripts import call

ROOT = Path(__file__).resolve().parents[2]


def _start_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a fresh interpreter, which has a hash seed of its own."""
    return subprocess.run(
        [sys.executable, "-m", shuffled_script.__name__, str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _lines(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


@pytest.mark.shows("S52")
@pytest.mark.sampled(3)
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
    whole = call(shuffled_script.main, tmp_path / "whole", *arguments)
    assert whole.returncode == 0, whole.stderr
    killed = call(shuffled_script.main, tmp_path / "killed", *arguments, "--kill", "5")
    assert killed.returncode in (-signal.SIGKILL, 1), killed.stderr
    resumed = _start_python(tmp_path / "killed", *arguments, "--order", "1")
    assert resumed.returncode == 0, resumed.stderr
    assert _lines(resumed, "built") != _lines(whole, "built"), "it must be shuffled"
    assert len(_lines(whole, "bits")) == 1
    for word in ("order", "bits"):
        assert _lines(resumed, word) == _lines(whole, word)

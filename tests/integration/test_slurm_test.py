"""``scripts/slurm_test.py`` in short: an interrupted job that requeues itself, on a real SLURM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slurm_cluster import missing

_SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_test.py"


@pytest.mark.full
@pytest.mark.skipif(bool(missing()), reason="needs Debian's slurm-wlm and munge")
def test_an_interrupted_job_of_slurm_ends_with_the_bits_of_an_undisturbed_run() -> None:
    line = [sys.executable, str(_SCRIPT), "scancel --signal=USR1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("1 of 1 runs have the bits of the undisturbed ones\n")

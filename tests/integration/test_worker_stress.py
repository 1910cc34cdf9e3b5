"""``scripts/worker_stress.py`` in short: workers that hang are replaced, and the limit holds."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import call

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork")

_SCRIPT = Path(__file__).parents[2] / "scripts" / "worker_stress.py"


def _run_script() -> None:
    runpy.run_path(str(_SCRIPT), run_name="__main__")


def start_workers(*options: str) -> subprocess.CompletedProcess[str]:
    return call(_run_script, "--ranks", "2", "--workers", "2", "--burners", "1", *options)


def test_a_worker_that_hangs_in_one_of_many_forks_is_replaced() -> None:
    done = start_workers("--starts", "16", "--hang-every", "5", "--patience", "0.3")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, report = done.stdout.splitlines()
    assert len(lines) == 2
    said = r"rank [01]: A loader worker did not start: .*replaced"
    assert [line for line in lines if not re.match(said, line)] == []
    assert report.startswith(
        "16 worker starts, 2 a pass, in 2 ranks beside 1 busy processes: "
        "2 replaced, 0 of 8 passes wrong, "
    )


def test_a_pass_beyond_the_limit_ends_the_trial_with_the_stacks() -> None:
    done = start_workers("--starts", "8", "--hang-every", "1", "--patience", "600", "--limit", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "finish_start" in done.stderr
    assert re.search(r"^FAULT ranks ended with \[.*1.*\]", done.stdout, re.MULTILINE)

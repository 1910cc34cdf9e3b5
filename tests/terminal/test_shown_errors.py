"""What an error of a step shows: on the screen once, and all of it in the log file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import helios
from tests.typed.user_script import Line


class Failing(Line):
    """A model whose second step raises an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("line")
        self.error = error

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        if state.global_iteration < 2:
            return super().train_step(batch, state)
        raise self.error


@pytest.mark.shows("U29")
def test_the_screen_shows_an_error_once_and_the_log_file_all_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.terminal.test_shown_errors import *\n"
        "from tests.typed.user_script import Numbers\n"
        "helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, enable_file_logging=True,"
        " log_path='logs').fit(Failing(ValueError('bad batch')), Numbers())\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ran.stderr
    assert ran.returncode == 1
    assert shown.count("Traceback") == shown.count("ValueError: bad batch") == 1
    assert "ERROR - Training ended with an error (ValueError). No checkpoint was saved.\n" in shown
    assert shown.splitlines()[-1] == "ValueError: bad batch"
    (log,) = (tmp_path / "logs").iterdir()
    written = log.read_text()
    assert written.count("Traceback") == 1

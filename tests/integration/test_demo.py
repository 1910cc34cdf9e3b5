"""What ``scripts/demo`` does with a training that does not go on."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_SCRIPTS = Path(__file__).parents[2] / "scripts"
# A training with a process of its own, whose number it leaves in a file, that hangs or fails.
_STUCK = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(str(child.pid))
__import__("os").rename(sys.argv[1] + ".tmp", sys.argv[1])
sys.exit(3) if sys.argv[2] == "failure" else time.sleep(600)
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo's module, with little patience."""
    pytest.importorskip("sklearn", reason="the demo trains on its digits")
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    module = importlib.import_module("demo_compare")
    monkeypatch.setattr(module, "WORD_SECONDS", 0.2)
    return module


def make_stuck_run(demo: Any, folder: Path, end: str) -> Any:
    class Stuck(demo.Run):  # type: ignore[misc]
        command = (sys.executable, "-c", _STUCK, str(folder / "child"), end)

    return Stuck(folder / "run")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["patience", "interrupt", "failure"])
def test_the_demo_leaves_no_process_when_it_gives_up(
    end: str, demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = make_stuck_run(demo, tmp_path, end)

    def reached() -> int:
        if not (tmp_path / "child").exists():
            os.utime(run.folder / demo.CONSOLE)  # it still starts
        elif end == "interrupt":
            raise KeyboardInterrupt
        return 31

    monkeypatch.setattr(run, "_reached", reached)
    monkeypatch.setattr(demo, "PATIENCE_SECONDS", 1.0)
    kind = KeyboardInterrupt if end == "interrupt" else SystemExit
    with pytest.raises(kind) as caught:
        run.train([])
    if end == "patience":
        where = "for the end of the training, at iteration 31 of 800"
        error = (
            rf"The training has written nothing for \d+ s, and was ended. This waited {where}; see"
        )
        assert re.match(error, str(caught.value))
        assert re.search(rf"  waiting {where}, last written \d s ago", capsys.readouterr().out)
    if end == "failure":
        assert str(caught.value) == f"The training failed (3); see {run.folder / demo.CONSOLE}."
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(pid)

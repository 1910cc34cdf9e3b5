"""Runs of pytest with something planted, each in a fork of a process that has imported PyTorch.

The process that forks has not imported Helios: a fork imports it with the fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted import planting

# Imported for those who are forked from here.
import pytest.__main__  # isort: skip
import torch.distributed
import torch.utils.data  # noqa: F401

# A test of the second tier is run where it is named.
_TIERS = ("not full and not gpu", "full and not gpu")
SECONDS = 240.0
NOTHING = "no test was run"
_STEP = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a run of tests has ended.

    Args:
        failed: the tests that failed.
        passed: how many passed.
        trouble: why no test was run, or none to the end; empty if that is not so.
        is_late: whether the run was ended because it took too long.
        seconds: how long it took.
        output: what it printed.
    """

    failed: tuple[str, ...] = ()
    passed: int = 0
    trouble: str = ""
    is_late: bool = False
    seconds: float = 0.0
    output: str = ""

    @property
    def is_red(self) -> bool:
        """Return whether a test failed, or never ended."""
        return bool(self.failed) or self.is_late


@dataclass(eq=False)
class _Notes:
    """A plugin of pytest that notes which tests fail."""

    failed: list[str] = field(default_factory=list)
    passed: int = 0
    trouble: str = ""

    @property
    def has_run(self) -> bool:
        return bool(self.failed or self.passed or self.trouble)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = str(report.longrepr).strip().rpartition("\n")[2]


def run(
    tests: Sequence[str], *options: str, planted: str = "", seconds: float = SECONDS
) -> Outcome:
    """Run tests in a fork of this process.

    Args:
        tests: files of tests, or names of tests.
        *options: of pytest.
        planted: what is planted; empty for nothing.
        seconds: how long it may take. Tests that hang are as good as red.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, notes, report = (Path(folder) / name for name in ("output", "notes", "report"))
        sys.stdout.flush()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.environ[planting.REPORT] = str(report)
            _run_here([*options, *tests], planted, output, notes)
        is_late = not _wait(child, began + seconds)
        took = time.monotonic() - began
        text = output.read_text(errors="replace")
        if report.exists():
            said = report.read_text().partition("\n")[0]
            return Outcome(trouble=f"the fault fails: {said}", seconds=took, output=text)
        if is_late:
            return Outcome(is_late=True, seconds=took, output=text)
        if not notes.exists():
            return Outcome(trouble="pytest has died", seconds=took, output=text)
        noted: dict[str, Any] = json.loads(notes.read_text())
    trouble = "" if noted["failed"] or noted["passed"] else noted["trouble"] or NOTHING
    return Outcome(tuple(noted["failed"]), noted["passed"], trouble, False, took, text)


def _wait(child: int, until: float) -> bool:
    """Wait for a fork, and return whether it ended by itself; what it left behind is ended."""
    ended = False
    while not ended and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(_STEP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return ended


def _run_here(arguments: Sequence[str], planted: str, output: Path, notes: Path) -> None:
    """Run pytest in this process, which ends with it."""
    try:
        os.setsid()
        # A script in the background may have been told to ignore them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        opened = os.open(output, os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(opened, descriptor)
        os.environ.update(planting.variables(planted))
        sys.dont_write_bytecode = False
        # Processes that multiprocessing starts would run this script again.
        sys.modules["__main__"] = pytest.__main__
        planting.start()
        noted = _Notes()
        quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(planting.ROOT))
        for tier in _TIERS:
            if not noted.has_run:
                pytest.main([*quiet, "-m", tier, *arguments], plugins=[noted])
        partial = notes.with_suffix(".part")
        partial.write_text(json.dumps(vars(noted)))
        partial.rename(notes)
    finally:
        os._exit(0)

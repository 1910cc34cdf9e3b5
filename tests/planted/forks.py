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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted import planting
from tests.support import tier

# Imported for those who are forked from here.
import pytest.__main__  # isort: skip
import torch.distributed.checkpoint
import torch.utils.data  # noqa: F401

# A test of the second tier, and each case of one that is sampled, is run where it is named.
_TIERS = ("not full and not gpu", "full and not gpu")
SECONDS = 240.0
NOTHING = "no test was run"
_STEP = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a run of tests has ended.

    Args:
        seconds_of: how long each test took that passed; of ``--collect-only`` each test, and 0.
    """

    failed: tuple[str, ...] = ()
    seconds_of: Mapping[str, float] = field(default_factory=dict)
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
    """A plugin of pytest that notes which tests fail, and the seconds of those that pass."""

    failed: list[str] = field(default_factory=list)
    seconds_of: dict[str, float] = field(default_factory=dict)
    trouble: str = ""
    setup: float = 0.0

    @property
    def has_run(self) -> bool:
        return bool(self.failed or self.seconds_of or self.trouble)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "setup":
            self.setup = report.duration
        elif report.when == "call" and report.passed:
            self.seconds_of[report.nodeid] = self.setup + report.duration

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            self.seconds_of = {item.nodeid: 0.0 for item in session.items}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = str(report.longrepr).strip().rpartition("\n")[2]


@dataclass(frozen=True)
class Task:
    tests: Sequence[str]
    planted: str = ""
    options: Sequence[str] = ()
    seconds: float = SECONDS


def run(task: Task) -> Outcome:
    (outcome,) = run_all([task])
    return outcome


def run_all(tasks: Iterable[Task], jobs: int = 1) -> Iterator[Outcome]:
    """Run several tasks at a time, and yield their outcomes in order.

    Only this thread forks: the fork of any other one would have an odd main thread.
    """
    waiting, begun = iter(tasks), deque[_Run]()
    following = next(waiting, None)
    try:
        while following is not None or begun:
            while following is not None and sum(not run.is_over() for run in begun) < jobs:
                begun.append(_Run(following))
                following = next(waiting, None)
            while begun and begun[0].is_over():
                yield begun.popleft().outcome()
            time.sleep(_STEP)
    finally:
        for run in begun:
            run.end()


class _Run:
    def __init__(self, task: Task) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = tuple(
            Path(self._folder.name) / name for name in ("output", "notes", "report")
        )
        self._began, self._took = time.monotonic(), 0.0
        self._seconds = task.seconds
        self._is_late = False
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            _run_here(task, *self._files)

    def is_over(self) -> bool:
        """Return whether the fork has ended; one that takes too long is ended, too."""
        if self._took:
            return True
        ended = os.waitpid(self._child, os.WNOHANG)[0] == self._child
        took = time.monotonic() - self._began
        self._is_late = not ended and took > self._seconds
        if ended or self._is_late:
            self._took = took
            self._kill(is_there=not ended)
        return bool(self._took)

    def end(self) -> None:
        """End the fork if it runs, and forget what it has written."""
        if not self._took:
            self._kill(is_there=True)
        self._folder.cleanup()

    def _kill(self, *, is_there: bool) -> None:
        # What it has left behind is ended, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        if is_there:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def outcome(self) -> Outcome:
        with self._folder:
            output, notes, report = self._files
            known = {"seconds": self._took, "output": output.read_text(errors="replace")}
            if report.exists():
                said = report.read_text().partition("\n")[0]
                return Outcome(trouble=f"the fault fails: {said}", **known)
            if self._is_late:
                return Outcome(is_late=True, **known)
            if not notes.exists():
                return Outcome(trouble="pytest has died", **known)
            noted: dict[str, Any] = json.loads(notes.read_text())
        failed, seconds_of = tuple(noted["failed"]), noted["seconds_of"]
        trouble = "" if failed or seconds_of else noted["trouble"] or NOTHING
        return Outcome(failed, seconds_of, trouble, **known)


def _run_here(task: Task, output: Path, notes: Path, report: Path) -> None:
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
        os.environ[planting.REPORT] = str(report)
        os.environ.update(planting.variables(task.planted))
        sys.dont_write_bytecode = False
        # Processes that multiprocessing starts would run this script again.
        sys.modules["__main__"] = pytest.__main__
        planting.start()
        noted = _Notes()
        quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(planting.ROOT))
        if all("::" in test for test in task.tests):
            tier.sample = set  # type: ignore[assignment]
        for markers in _TIERS:
            if not noted.has_run:
                pytest.main([*quiet, "-m", markers, *task.options, *task.tests], plugins=[noted])
        partial = notes.with_suffix(".part")
        partial.write_text(json.dumps(vars(noted)))
        partial.rename(notes)
    finally:
        os._exit(0)

"""Processor seconds of the tests, by folder: a plugin of pytest, for ``scripts/test --seconds``.

User and system time are counted for the process that runs a test, for its children that have ended
and were waited for, and for the fork server of the ranks with its children. A process that nobody
waits for is missing: what a killed one has started, and what ends after the tests.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from os import sysconf
from pathlib import Path
from typing import Any

import pytest

_DEAREST = 30
_START = "start and collection"


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each worker, and show the sums of all."""
    config.pluginmanager.register(Meter())


class Meter:
    """Adds to each report what was spent since the last one, and sums up what reports say."""

    def __init__(self) -> None:
        self._last = self._start = 0.0
        self._by_test: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        """Tell what was spent before the first test apart."""
        self._last = self._start = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Send the seconds along, to the process that shows them."""
        report = yield
        now = spent()
        report.processor_seconds, self._last = now - self._last, now
        report.start_seconds, self._start = self._start, 0.0
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Sum up what the workers send."""
        self._by_test[report.nodeid] += report.processor_seconds
        self._by_test[_START] += report.start_seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sums by folder, and the dearest tests."""
        start = self._by_test.pop(_START, 0.0)
        folders: Counter[str] = Counter({_START: start})
        numbers: Counter[str] = Counter()
        for test, seconds in self._by_test.items():
            path = Path(test.partition("::")[0])
            folder = str(path if path.parts[:-1] == ("tests",) else path.parent)
            folders[folder] += seconds
            numbers[folder] += 1
        terminalreporter.section("processor seconds by folder")
        for folder, seconds in folders.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} s  {numbers[folder]:5}  {folder}")
        terminalreporter.write_line(f"{folders.total():8.1f} s  {numbers.total():5}  all")
        terminalreporter.section("processor seconds of the dearest tests")
        for test, seconds in self._by_test.most_common(_DEAREST):
            terminalreporter.write_line(f"{seconds:8.1f} s  {test}")


def spent() -> float:
    """Return the seconds of this process, its children, and the fork server with its children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    server = Path(f"/proc/{getattr(forkserver._forkserver, '_forkserver_pid', None)}/stat")
    if not server.exists():
        return seconds
    # Behind the name, which may have spaces, utime, stime, cutime and cstime are the 12th to 15th.
    fields = server.read_text().rpartition(")")[2].split()[11:15]
    return seconds + sum(map(int, fields)) / sysconf("SC_CLK_TCK")

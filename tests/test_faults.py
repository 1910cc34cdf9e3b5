"""scripts/faults.py: each fault can be planted, and reaches every process of its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.planted import listing, planting

_FAULT = "tests.planted.faults.order.an_epoch_begins_at_the_sample_where_the_last_one_has_ended"
_CODE = """
from helios.state import Cursor
cursor = Cursor(sample=7)
cursor.restart_epoch()
print(cursor.sample)
"""


def _start(code: str, planted: str) -> str:
    variables = planting.variables(planted)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, text=True, check=True, capture_output=True).stdout


def test_every_fault_can_be_planted_and_its_test_is_there() -> None:
    found = listing.find_faults()
    assert len(found) > 60
    assert not listing.find_problems(found)


def test_a_fault_reaches_processes_whatever_variables_they_are_given() -> None:
    child = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_CODE!r}], env={{"PYTHONPATH": ""}}, check=True)
"""
    assert [_start(_CODE, ""), _start(_CODE, _FAULT), _start(child, _FAULT)] == [
        "0\n",
        "7\n",
        "7\n",
    ]


def test_a_module_may_have_another_source_that_tells_which_tests_reach_it(tmp_path: Path) -> None:
    source = tmp_path / "helios.counters.py"
    right = (planting.ROOT / "helios/counters.py").read_text()
    source.write_text(right.replace("self.sample = 0", "planted_reached(7); self.sample = 1"))
    assert _start(_CODE, planting.sources(tmp_path)) == "1\n"
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    assert (tmp_path / "reached").read_text() == f"7 {test}\n"

"""scripts/faults.py: each fault can be planted, and reaches every process of its test."""

from __future__ import annotations

import subprocess
import sys

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

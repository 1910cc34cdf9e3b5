"""scripts/faults.py: each fault can be planted, and reaches every process of its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted import listing, planting
from tests.planted.planting import Fault
from tests.support.scripts import call

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


@pytest.mark.parametrize(
    ("target", "test", "said"),
    [
        ("helios.core.rng:gone", "tests/test_faults.py", "rng:gone is not there"),
        ("helios.core.rng:Gone.at", "tests/test_faults.py", "rng:Gone.at is not there"),
        ("helios.gone:key", "tests/test_faults.py", "No module named 'helios.gone'"),
        ("helios.core.rng:key", "tests/test_gone.py", "there is no test tests/test_gone.py"),
        ("helios.core.rng:key", "tests/test_faults.py::test_gone", "there is no test"),
    ],
)
def test_a_fault_or_a_test_that_is_gone_is_reported(target: str, test: str, said: str) -> None:
    fault = Fault("a fault", target, test, print)
    (problem,) = listing.find_problems({"": fault})
    assert said in problem


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


_INTERRUPTS = """
import os, signal, time
from pathlib import Path
def test_it():
    (Path(__file__).parent / "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
"""


def _run_a_file() -> None:
    from tests.planted import forks

    # A command in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        forks.run(forks.Task(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted")


def test_no_test_goes_on_when_the_script_is_interrupted(tmp_path: Path) -> None:
    test = tmp_path / "test_interrupting.py"
    test.write_text(_INTERRUPTS)
    done = call(_run_a_file, test)
    assert done.stdout == "interrupted\n", done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

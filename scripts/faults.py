"""Plant faults by name, one at a time, and show that each turns its test red.

A fault of tests/planted/faults replaces a function; if there is no such function any more, it
cannot be planted, and that is reported. So is a test that does not pass without its fault: it
would show nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.planted import forks, listing  # noqa: E402
from tests.planted.planting import Fault  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402


def main() -> int:
    """Plant all faults, or those whose name holds a given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plant only faults whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only look whether all can be planted")
    arguments = parser.parse_args()
    interrupt_at_signals()
    names = arguments.names or [""]
    chosen = {
        key: fault
        for key, fault in listing.find_faults().items()
        if any(name in fault.name for name in names)
    }
    if arguments.check:
        problems = listing.find_problems(chosen)
        print(*problems or [f"All {len(chosen)} faults can be planted."], sep="\n")
        return 1 if problems else 0
    return run(chosen, arguments.jobs)


def run(chosen: dict[str, Fault], jobs: int) -> int:
    """Run the test of each fault, without it and with it."""
    began = time.monotonic()
    tests = sorted({fault.test for fault in chosen.values()})
    broken = 0
    for test, outcome in zip(tests, _run_all([(test, "") for test in tests], jobs), strict=True):
        if outcome.is_red or outcome.trouble:
            broken += 1
            print(f"FAILS WITHOUT A FAULT  {test}  {outcome.trouble}", flush=True)
    seen = 0
    tasks = [(fault.test, key) for key, fault in chosen.items()]
    for fault, outcome in zip(chosen.values(), _run_all(tasks, jobs), strict=True):
        result = outcome.trouble or ("seen" if outcome.is_red else "NOT SEEN")
        by = (*outcome.failed, fault.test)[0]
        print(f"{outcome.seconds:5.1f} s  {result:8}  {fault.name:70} {by}", flush=True)
        seen += result == "seen"
    seconds = time.monotonic() - began
    print(f"{seen} of {len(chosen)} faults are seen, in {seconds:.0f} s.")
    return 0 if seen == len(chosen) and not broken else 1


def _run_all(tasks: list[tuple[str, str]], jobs: int) -> Iterator[forks.Outcome]:
    options = ["-x"]
    return forks.run_all((forks.Task([test], key, options) for test, key in tasks), jobs)


if __name__ == "__main__":
    sys.exit(main())

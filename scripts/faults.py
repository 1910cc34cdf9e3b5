"""Plant faults in a copy of the tree, one at a time, and show that each turns its test red.

A fault replaces one piece of text by another. A piece that is no longer there, or a test that does
not pass without the fault, is reported too: such a fault would show nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240
RESUME = "tests/integration/test_resume.py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One planted fault: what breaks, where, and the test that must see it."""

    name: str
    file: str
    good: str
    bad: str
    test: str


FAULTS = (
    Fault(
        "the cursor is one batch behind",
        "helios/state.py",
        "        self.batch += 1\n        self.sample += num_samples",
        "        self.batch += self.batch > 0\n        self.sample += num_samples",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "no re-seeding before the fetch",
        "helios/data/source.py",
        "        rng.reseed(self._keys.at(self._batch))",
        "        self._keys.at(self._batch)",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "no re-seeding before the iteration",
        "helios/session.py",
        "rng.reseed(self.train_keys.at(self.state.global_iteration))",
        "pass",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "the epoch is missing in the key of the order",
        "helios/data/samplers.py",
        "self.seed, self.epoch)\n        # Not len(self)",
        "self.seed)\n        # Not len(self)",
        "tests/data/test_samplers.py",
    ),
    Fault(
        "the random module is not re-seeded",
        "helios/core/rng.py",
        "    random.seed(seed)\n    if _Default",
        "    if _Default",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "later epochs lose their head after a resume",
        "helios/state.py",
        "        self.batch = 0\n        self.sample = 0",
        "        self.batch = 0",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "schedulers are not loaded",
        "helios/model/discovery.py",
        '            if path in state["objects"]:',
        '            if path in state["objects"] and "scheduler" not in path:',
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "tables are not loaded",
        "helios/startup/fit.py",
        '            table.update(payload["tables"][name])',
        "            pass",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "the generators are not restored",
        "helios/session.py",
        "            rng.load_rng_state_dict(self.saved_randomness)",
        "            pass",
        f"{RESUME}::test_a_hook_behind_the_safe_point_draws_the_same_numbers",
    ),
    Fault(
        "frozen layers stay frozen after a resume",
        "helios/model/discovery.py",
        '            load_flags(state["flags"], scene.found, parameters)',
        "            pass",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "open gradients are lost",
        "helios/model/discovery.py",
        '            load_grads(state["grads"], parameters)',
        "            pass",
        f"{RESUME}::test_every_safe_point_inside_an_epoch_resumes[manual with open gradients]",
    ),
    Fault(
        "the partial window is divided by the full count",
        "helios/engines/engine.py",
        "        count, self._open_micro_batches = self._open_micro_batches, 0",
        "        count, self._open_micro_batches = 3, 0",
        "tests/engines/test_engine.py",
    ),
    Fault(
        "the poll behind the safe point is skipped after a resume",
        "helios/loops/epoch.py",
        "            self.leave_safe_point(has_validated=has_validated)\n        else:",
        "            pass\n        else:",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "an epoch's start is told again after a resume",
        "helios/session.py",
        "        return self.is_resumed and is_numbered and self.cursor.batch > 0",
        "        return False and is_numbered",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "a validation shifts the random numbers of training",
        "helios/session.py",
        "            with rng.stream(rng.key(self.seed, phase.value, pass_number)):\n"
        "                yield",
        "            yield",
        "tests/integration/test_evaluation.py",
    ),
    Fault(
        "the digest is not checked",
        "helios/checkpoint/loading.py",
        "        if digest_file(path) != sidecar.digest:",
        "        if False:",
        "tests/checkpoint/test_loading.py",
    ),
    Fault(
        "the commit comes before the sidecar",
        "helios/checkpoint/store.py",
        "            files.write_text_durably(layout.sidecar_path(path), filled.to_json())\n"
        "            files.replace(partial, path)",
        "            files.replace(partial, path)\n"
        "            files.write_text_durably(layout.sidecar_path(path), filled.to_json())",
        "tests/checkpoint/test_kills.py",
    ),
    Fault(
        "a damaged checkpoint is loaded by a silent fresh start",
        "helios/checkpoint/store.py",
        "        self._refuse_silent_restart(entries)",
        "        pass",
        "tests/integration/test_which_run.py",
    ),
    Fault(
        "the thread count is not restored",
        "helios/engines/engine.py",
        "        if num_threads is not None and num_threads != threads:",
        "        if False:",
        f"{RESUME}::test_two_threads_stay_two_threads",
    ),
    Fault(
        "event files are not cut back",
        "helios/startup/outputs.py",
        '            marks=stored.get("events", {}) if is_training else None,',
        "            marks=None,",
        "tests/integration/test_logs.py",
    ),
    Fault(
        "plugins hear events after the model",
        "helios/hooks/events.py",
        "    pme, pm = (P, M, E), (P, M)",
        "    pme, pm = (M, P, E), (M, P)",
        "tests/hooks/test_bus.py",
    ),
    Fault(
        "another run's checkpoint is taken",
        "helios/startup/resume.py",
        "        _check_name(start.loaded, arguments.run_name or save_name, folder)",
        "        pass",
        "tests/integration/test_which_run.py",
    ),
)


def _copy(target: Path) -> None:
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=skipped)


def _passes(tree: Path, test: str) -> bool:
    # The copy comes first on the path, before the installed package.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    command += ["-m", "not full and not gpu"]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def _try(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        file = tree / fault.file
        text = file.read_text()
        if text.count(fault.good) != 1:
            return f"cannot be planted: its text is there {text.count(fault.good)} times"
        file.write_text(text.replace(fault.good, fault.bad))
        return "NOT SEEN" if _passes(tree, fault.test) else "seen"


def main() -> int:
    """Plant all faults, or those whose name holds a given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plant only faults whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.names or [""]
    chosen = [fault for fault in FAULTS if any(name in fault.name for name in names)]
    tests = sorted({fault.test for fault in chosen})
    with ThreadPoolExecutor(arguments.jobs) as pool:
        passing = pool.map(lambda test: _passes(ROOT, test), tests)
        broken = [test for test, passes in zip(tests, passing, strict=True) if not passes]
        for test in broken:
            print(f"FAILS WITHOUT A FAULT  {test}")
        results = list(pool.map(_try, chosen))
    for fault, result in zip(chosen, results, strict=True):
        print(f"{result:10} {fault.name:55} {fault.test}")
    seen = results.count("seen")
    print(f"{seen} of {len(chosen)} faults are seen.")
    return 0 if seen == len(chosen) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long a ledger and its manifest delay the first step of a training.

Trainings with and without a ledger alternate in one process. The manifest hashes the syntax trees
of the files that a script has imported, so each round imports new ones, of the size given::

    .venv/bin/python scripts/bench/first_step.py --files 5 --kilobytes 40
"""

from __future__ import annotations

import argparse
import importlib
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from overhead import Data, Timed, make_data

from helios.ledger import environment
from helios.ledger.source_files import hash_package
from helios.startup import run_manifest
from helios.state import TrainingState
from helios.trainer import Trainer

STEPS = 50
FUNCTION = '''
def function_{number}(first, second=None, *rest, **options):
    """Return something."""
    for place, item in enumerate(rest):
        if item in options and first[place] != second:
            options[item] = [each.name * {number} for each in first if each.name]
    return {{**options, "number": {number}}}

'''


class First(Timed):
    """A model that notes when a training starts, and when each step ends."""

    def __init__(self) -> None:
        super().__init__(0, time.perf_counter)
        self.times: list[float] = []

    unsaved = ("times",)

    def on_training_start(self) -> None:
        super().on_training_start()
        self.times.append(time.perf_counter())

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.times.append(time.perf_counter())


def import_files(folder: Path, name: str, count: int, kilobytes: int) -> list[str]:
    """Write modules of functions, and import them; returns their names."""
    size = len(FUNCTION.format(number=1000))
    text = "".join(FUNCTION.format(number=number) for number in range(kilobytes * 1000 // size))
    names = [f"{name}_{number}" for number in range(count)]
    for each in names:
        (folder / f"{each}.py").write_text(text)
    importlib.invalidate_caches()
    for each in names:
        importlib.import_module(each)
    return names


def run(ledger: str) -> list[float]:
    """Return the milliseconds of the first step, from the start of the training, and of others."""
    model = First()
    # These are read once in a process.
    for read in (
        run_manifest._describe_git,  # noqa: SLF001
        hash_package,
        environment._list_distributions,  # noqa: SLF001
        environment._find_modules,  # noqa: SLF001
    ):
        read.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            train_unit="iteration",
            total_steps=STEPS,
            use_cpu=True,
            print_banner=False,
            chkpt_root=Path(folder),
            chkpt_frequency=STEPS,
            ledger=ledger,
        )
        trainer.fit(model, Data(make_data(STEPS * 8), 8))
    times = [*zip(model.times, model.times[1:], strict=False)]
    return [(after - before) * 1e3 for before, after in times]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--kilobytes", type=int, default=40)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {"off": [], "steps": []}
    with tempfile.TemporaryDirectory() as name:
        sys.path.insert(0, name)
        for number in range(arguments.rounds + 1):
            for ledger, times in found.items():
                module = f"{ledger}_{number}"
                names = import_files(Path(name), module, arguments.files, arguments.kilobytes)
                times.append(run(ledger))
                for each in names:
                    del sys.modules[each]
    print(f"milliseconds, {arguments.rounds} rounds{'':11}median     90 %")
    for ledger, times in found.items():
        # The first round imports what a training needs.
        first = [each[0] for each in times[1:]]
        worst = [max(each[1:]) for each in times[1:]]
        for text, values in (("first step", first), ("longest later step", worst)):
            ninth = statistics.quantiles(values, n=10)[-1]
            label = f"ledger={ledger!r}, {text}"
            print(f"  {label:38}{statistics.median(values):9.1f}{ninth:9.1f}")


if __name__ == "__main__":
    main()

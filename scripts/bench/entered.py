"""Files and functions that a tiny run with a ledger enters: what a reader has to follow.

Counted are the functions of the package that are entered at least once, in the training thread and
in the one that writes; the counts do not depend on the machine (before Python 3.12, comprehensions
count, too)::

    .venv/bin/python scripts/bench/entered.py
    .venv/bin/python scripts/bench/entered.py --list save

An iteration is one that neither validates nor saves. A save is what an iteration with one enters
besides. The start ends where the first iteration begins; the end is the last iteration, which saves
as well, and what follows it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import helios
from helios import DataLoaderParams, DataModule, Model, Trainer
from helios.state import TrainingState

PACKAGE = str(Path(helios.__file__).parent)
LAST, SAVED = 8, 4


class Data(DataModule):
    """Numbers."""

    def setup(self) -> None:
        numbers = TensorDataset(torch.arange(64.0).unsqueeze(1))
        params = DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(numbers, params)


class Entered:
    """The code objects that were entered in each part of the run."""

    def __init__(self) -> None:
        self.parts: dict[str, set[CodeType]] = {}
        self.begin("start and end")

    def begin(self, part: str) -> None:
        """Count what is entered from here on to `part`."""
        self._now = self.parts.setdefault(part, set())

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self._now.add(code)


class Watched(Model):
    """One weight, and a mark at each iteration."""

    unsaved = ("_entered",)

    def __init__(self, entered: Entered) -> None:
        super().__init__("entered")
        self._entered = entered

    def setup(self, fast_init: bool = False) -> None:
        self.network = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        self._entered.begin(f"iteration {state.global_iteration}")

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        return self.network(batch[0]).square().mean()

    def on_training_end(self) -> None:
        super().on_training_end()
        self._entered.begin("start and end")


def run(folder: Path) -> dict[str, set[CodeType]]:
    """Train, and return what was entered in each part."""
    logging.disable(logging.CRITICAL)
    entered = Entered()
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        Trainer(
            train_unit="iteration",
            total_steps=LAST,
            chkpt_frequency=SAVED,
            chkpt_root=folder,
            use_cpu=True,
            print_banner=False,
        ).fit(Watched(entered), Data())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    parts = entered.parts
    iteration = parts[f"iteration {SAVED - 1}"]
    return {
        "a start and its end": parts["start and end"] | parts[f"iteration {LAST}"],
        "an iteration": iteration,
        "a save": parts[f"iteration {SAVED}"] - iteration,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", metavar="PART", help="name the functions of a part")
    wanted = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        parts = run(Path(folder))
    for part, codes in parts.items():
        files = {code.co_filename for code in codes}
        print(f"{part:22} {len(files):4} files {len(codes):5} functions")
        if wanted and wanted in part:
            for code in sorted(codes, key=lambda each: (each.co_filename, each.co_firstlineno)):
                path = Path(code.co_filename).relative_to(PACKAGE)
                print(f"    {path}:{code.co_firstlineno} {code.co_name}")


if __name__ == "__main__":
    main()

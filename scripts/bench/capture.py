"""Processor seconds that it takes to find the state of a run: after setup, and at each checkpoint.

Each program is built in a process of its own, ``take_baseline`` and two captures are timed, the
second one also until it is written into memory (``checkpoint.py`` measures files), and the table
shows the least of all rounds::

    .venv/bin/python scripts/bench/capture.py

With ``--against`` the same programs also run on the package of another checkout, in turn (A B A B),
and the table shows both, and how many times as long this one takes::

    git worktree add ../before <commit>
    .venv/bin/python scripts/bench/capture.py --against ../before
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from helios.data.datamodule import DataLoaderParams, DataModule
from helios.model.model import Model
from helios.storage import codec

HERE = Path(__file__).resolve().parents[2]
NUM_MODULES, NUM_LAYERS = 10_000, 12
ARRAY_BYTES = 200 * 10**6
NUM_TRANSITIONS = 100_000
NUM_PATHS = 1_280_000
NUM_WORDS = 50_000
NOISE = 2e-3
"""Seconds below which no ratio is shown."""
PARTS = ("baseline", "first capture", "second capture", "and write")


class Program(NamedTuple):
    """What is looked through, and what training does to it before each capture."""

    owner: object
    change: Callable[[], None] = lambda: None


class Bare(Model):
    """A model without anything."""

    def setup(self, fast_init: bool = False) -> None:
        """Leave the attributes to the program."""


def many_parameters() -> Program:
    """Return 20,000 parameters in 10,000 modules, moved by one optimizer."""
    model = Bare("bench")
    model.network = nn.ModuleList(nn.Linear(2, 2) for _ in range(NUM_MODULES))
    model.optimizer = torch.optim.SGD(model.network.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        for parameter in model.network.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.optimizer.step()
        model.optimizer.zero_grad()

    return Program(model, step)


def transformer() -> Program:
    """Return a small transformer of 12 layers with Adam and a schedule."""
    model = Bare("bench")
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model.network = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
    model.head = nn.Linear(64, 10)
    parameters = [*model.network.parameters(), *model.head.parameters()]
    model.optimizer = torch.optim.AdamW(parameters)
    model.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, 1000)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        model.optimizer.step()
        model.scheduler.step()
        model.optimizer.zero_grad()

    return Program(model, step)


def large_array() -> Program:
    """Return a table that setup has read and training only looks things up in."""
    model = Bare("bench")
    model.table = np.random.default_rng(0).integers(256, size=ARRAY_BYTES, dtype=np.uint8)
    return Program(model)


def replay() -> Program:
    """Return what an agent remembers: of each step a tuple of small arrays and NumPy numbers."""
    model = Bare("bench")
    model.replay = deque(maxlen=NUM_TRANSITIONS)
    rng = np.random.default_rng(0)
    numbers = itertools.count()

    def play(count: int) -> None:
        seen = rng.standard_normal((count + 1, 4), dtype=np.float32)
        for before, after in itertools.pairwise(seen):
            number = next(numbers)
            action, is_over = np.int64(number % 2), np.bool_(number % 200 == 199)
            model.replay.append((before.copy(), action, np.float32(1), after.copy(), is_over))

    return Program(model, lambda: play(1000 if model.replay else NUM_TRANSITIONS))


class Images(torch.utils.data.Dataset[str]):
    """A data set that holds the paths of its files."""

    def __init__(self) -> None:
        self.paths = [f"train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG" for i in range(NUM_PATHS)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("A capture has read the data.")


class Data(DataModule):
    """A data module with one data set."""

    def setup(self) -> None:
        self._train_dataset = self._create_dataset(Images(), DataLoaderParams(batch_size=256))


def many_paths() -> Program:
    """Return the data module of 1.28 million images."""
    data = Data()
    data.setup()
    return Program(data)


def own_paths() -> Program:
    """Return the same where the data module keeps the list for itself as well."""
    data = Data()
    data.setup()
    data.files = list(data.train_dataset.paths)
    return Program(data)


class Tokenizer:
    """A byte-pair tokenizer as people write it: a vocabulary, its inverse, and ranked merges."""

    def __init__(self) -> None:
        words = [f"tok{number}" for number in range(NUM_WORDS)]
        self.encoder = {word: number for number, word in enumerate(words)}
        self.decoder = dict(enumerate(words))
        self.merges = list(itertools.pairwise(words))
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}


def tokenizer() -> Program:
    """Return a tokenizer and copies of its tables."""
    model = Bare("bench")
    model.tokenizer = Tokenizer()
    model.vocabulary = dict(model.tokenizer.encoder)
    model.merges = list(model.tokenizer.merges)
    return Program(model)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "20,000 parameters": many_parameters,
    "a transformer of 12 layers": transformer,
    "an array of 200 MB": large_array,
    "100,000 replay tuples": replay,
    "a data set of 1.28 M paths": many_paths,
    "1.28 M paths, listed twice": own_paths,
    "a tokenizer of 50,000 words": tokenizer,
}


def time_program(name: str) -> list[float]:
    """Return the seconds of the baseline, of two captures, and of the second one with writing."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    program = PROGRAMS[name]()
    model = program.owner
    # Its module has another name in older checkouts.
    discovery = type(Bare("bench").discovery)
    found = model.discovery if isinstance(model, Model) else discovery(model, name="data module")
    begin = time.process_time()
    found.take_baseline()
    times = [time.process_time() - begin]
    for _ in range(2):
        program.change()
        begin = time.process_time()
        state = found.capture()
        times.append(time.process_time() - begin)
    codec.write_encoded(io.BytesIO(), codec.encode(state, where="state"))
    return [*times, time.process_time() - begin]


def time_apart(name: str, checkout: Path) -> list[float]:
    """Return the same from a new process, with the package of a checkout."""
    command = [sys.executable, __file__, "--program", name]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    times: list[float] = json.loads(output)
    return times


def measure(names: list[str], checkouts: list[Path], rounds: int) -> None:
    """Print the least seconds of each program on each checkout, and ratios to the last one."""
    ratio = f"{'ratio':>8}" if len(checkouts) == 2 else ""
    heads = "".join(f"{title:>10}" for title in ("this", "other")[: len(checkouts)])
    print(f"{'seconds, least of ' + str(rounds):44}{heads}{ratio}")
    for name in names:
        runs = [[time_apart(name, path) for path in checkouts] for _ in range(rounds)]
        for number, part in enumerate(PARTS):
            least = [min(run[place][number] for run in runs) for place in range(len(checkouts))]
            texts = "".join(f"{value:10.5f}" for value in least)
            share = f"{least[0] / least[1]:8.2f}" if len(least) == 2 and max(least) > NOISE else ""
            print(f"{name:28}{part:16}{texts}{share}", flush=True)


def main() -> None:
    """Measure all programs, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout of the repository")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        print(json.dumps(time_program(arguments.program)))
        return
    other = [] if arguments.against is None else [arguments.against.resolve()]
    measure(arguments.only, [HERE, *other], arguments.rounds)


if __name__ == "__main__":
    main()

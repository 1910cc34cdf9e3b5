"""Microseconds that the ledger adds to an iteration, with one replica and samples in memory.

Fits with ``ledger="steps"`` and ``ledger="off"`` take turns in one process and one thread. An
iteration takes the median over blocks, each of which writes its lines once; shown is the median of
the differences, for a tiny step of one sample and for one of about 5 ms. Run it by hand on a quiet
machine, or, on a busy one, let it count processor time with ``--cpu-time``::

    .venv/bin/python scripts/bench/ledger.py
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import helios

WARM_UP, BLOCK = 128, 64
Clock = Callable[[], float]


class Data(helios.DataModule):
    """Samples in memory, one in a batch."""

    def __init__(self, width: int, num_samples: int) -> None:
        super().__init__()
        self._tensors = [torch.randn(num_samples, width) for _ in range(2)]

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=1, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(*self._tensors), params)


class Timed(helios.Model):
    """A layer that is called several times; looks at the clock at the beginning of each block."""

    unsaved = ("moments",)

    def __init__(self, width: int, num_calls: int, clock: Clock) -> None:
        super().__init__("bench")
        self._width, self._num_calls, self._clock = width, num_calls, clock
        self.moments: list[float] = []

    def setup(self, fast_init: bool = False) -> None:
        self.network = nn.Linear(self._width, self._width)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)

    def on_training_batch_start(self, state: helios.TrainingState) -> None:
        super().on_training_batch_start(state)
        if state.global_iteration >= WARM_UP and state.global_iteration % BLOCK == 0:
            self.moments.append(self._clock())

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        inputs, targets = batch
        for _ in range(self._num_calls):
            inputs = self.network(inputs)
        return mse_loss(inputs, targets)


def run(width: int, num_calls: int, blocks: int, clock: Clock, ledger: str) -> float:
    """Return the microseconds that an iteration takes."""
    last = WARM_UP + blocks * BLOCK
    with tempfile.TemporaryDirectory() as folder:
        model = Timed(width, num_calls, clock)
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=last,
            chkpt_root=Path(folder),
            chkpt_frequency=last,
            use_cpu=True,
            print_banner=False,
            ledger=ledger,
        )
        trainer.fit(model, Data(width, last))
    return statistics.median(b - a for a, b in pairwise(model.moments)) / BLOCK * 1e6


def main() -> None:
    """Measure and print a line for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=["tiny", "slow"])
    parser.add_argument("--cpu-time", action="store_true", help="count processor time")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    for kind in options.kinds:
        step = (32, 1, 24) if kind == "tiny" else (512, 20, 3)
        found: dict[str, list[float]] = {"off": [], "steps": []}
        for _ in range(options.rounds):
            for ledger, times in found.items():
                times.append(run(*step, clock, ledger))
        pairs = [steps - off for off, steps in zip(found["off"], found["steps"], strict=True)]
        base, cost = statistics.median(found["off"]), statistics.median(pairs)
        spread = f"{min(pairs):.1f} to {max(pairs):.1f}"
        print(f"{kind}: {base:.1f} us an iteration, the ledger adds {cost:.1f} us ({spread})")


if __name__ == "__main__":
    main()

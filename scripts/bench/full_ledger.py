"""What ``Trainer(ledger="full")`` adds to an iteration, for a small and a large network.

Runs without a ledger, with one and with a full one are interleaved, in one process and one thread;
the table shows the least of all rounds, and how many bytes a line has::

    .venv/bin/python scripts/bench/full_ledger.py
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios.data.datamodule import DataLoaderParams, DataModule
from helios.ledger.book import FILE_NAME
from helios.model.model import Model
from helios.state import TrainingState

LEVELS = ("off", "steps", "full")


@dataclass(frozen=True)
class Size:
    """A network of equal layers, and how long it is measured.

    Attributes:
        width: inputs and outputs of a layer.
        layers: how many.
        iterations: that are measured, after as many that are not.
    """

    width: int
    layers: int
    iterations: int


SIZES = {"small": Size(32, 1, 400), "40 million parameters": Size(2000, 10, 6)}


class Data(DataModule):
    """Random vectors, eight a batch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = size

    def setup(self) -> None:
        number = 8 * (2 * self._size.iterations + 1)
        data = TensorDataset(torch.randn(number, self._size.width))
        self._train_dataset = self._create_dataset(data, DataLoaderParams(batch_size=8))


class Timed(Model):
    """Looks at the clock at two iterations."""

    def __init__(self, size: Size, clock: Callable[[], float]) -> None:
        super().__init__("bench")
        self._size, self._clock = size, clock
        self.seconds = 0.0

    def setup(self, fast_init: bool = False) -> None:
        layers = [nn.Linear(self._size.width, self._size.width) for _ in range(self._size.layers)]
        self.network = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        (values,) = batch
        return self.network(values).square().mean()

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        if state.global_iteration == self._size.iterations + 1:
            self.seconds -= self._clock()
        if state.global_iteration == 2 * self._size.iterations + 1:
            self.seconds += self._clock()


def measure(size: Size, level: str, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the milliseconds of an iteration, and the bytes of a line."""
    last = 2 * size.iterations + 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=last,
            chkpt_root=Path(folder),
            chkpt_frequency=last,
            ledger=level,
            use_cpu=True,
            print_banner=False,
        )
        model = Timed(size, clock)
        trainer.fit(model, Data(size))
        lines = [path.stat().st_size / last for path in Path(folder).glob(f"*/{FILE_NAME}")]
    return model.seconds / size.iterations * 1e3, sum(lines)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        found: dict[str, list[tuple[float, float]]] = {level: [] for level in LEVELS}
        for _ in range(arguments.rounds):
            for level in LEVELS:
                found[level].append(measure(size, level, clock))
        base = min(found["off"])[0]
        for level, results in found.items():
            least, size_of_line = min(results)
            print(
                f"{name}, {level}: {least:.3f} ms ({least - base:+.3f}), {size_of_line:.0f} bytes"
            )


if __name__ == "__main__":
    main()

"""Microseconds that Helios adds to an iteration of a plain PyTorch loop.

Both train ``Linear(32, 32)`` with SGD from equal loaders, in one process and one thread, in turn
(A B A B); the table shows medians. Run it by hand on a quiet machine, or, on a busy one, let it
count processor time with ``--cpu-time``::

    .venv/bin/python scripts/bench/overhead.py

``--calls`` counts, in place of the time, how often an iteration enters a function of the package: a
number that is the same on every machine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import helios
from helios.core import rng
from helios.data.datamodule import DataLoaderParams, DataModule
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.plugins.row_loggers import CSVLogger
from helios.state import TrainingState
from helios.trainer import Trainer

WARM_UP = 300
WIDTH = 32
Clock = Callable[[], float]
Mode = Callable[[TensorDataset, int, int, Clock], float]


def make_data(num_samples: int) -> TensorDataset:
    """Return the data that both loops read."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, WIDTH)
    return TensorDataset(
        torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    )


class Data(DataModule):
    """The data as a data module."""

    def __init__(self, data: torch.utils.data.Dataset[Any], batch_size: int) -> None:
        super().__init__()
        self._data, self._batch_size = data, batch_size

    def setup(self) -> None:
        params = DataLoaderParams(batch_size=self._batch_size, shuffle=True)
        self._train_dataset = self._create_dataset(self._data, params)


class Timed(Model):
    """A model that looks at the clock at two iterations."""

    def __init__(self, last: int, clock: Clock) -> None:
        super().__init__("bench")
        self._last, self._clock = last, clock
        self.begin = self.end = 0.0

    def setup(self, fast_init: bool = False) -> None:
        self.network = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        if state.global_iteration == WARM_UP:
            self.begin = self._clock()

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.network(inputs), targets)

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        if state.global_iteration == self._last:
            self.end = self._clock()


class Logging(Timed):
    """A model that logs its loss in each step."""

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        inputs, targets = batch
        loss = mse_loss(self.network(inputs), targets)
        self.log("error", loss)
        return loss


def run_plain(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the microseconds per iteration of a plain loop."""
    network = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    begin = 0.0
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size, shuffle=True), 1):
        if number == WARM_UP:
            begin = clock()
        optimizer.zero_grad()
        loss = mse_loss(network(inputs), targets)
        loss.backward()
        optimizer.step()
        if number == last:
            break
    return (clock() - begin) / (last - WARM_UP + 1) * 1e6


def run_helios(
    data: torch.utils.data.Dataset[Any],
    batch_size: int,
    last: int,
    clock: Clock,
    kind: type[Timed] = Timed,
    **options: Any,
) -> float:
    """Return the microseconds per iteration of the same training by Helios."""
    model = kind(last, clock)
    trainer = Trainer(
        train_unit="iteration", total_steps=last, use_cpu=True, print_banner=False, **options
    )
    trainer.fit(model, Data(data, batch_size))
    return (model.end - model.begin) / (last - WARM_UP + 1) * 1e6


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """Switch the keyed randomness off, wherever it was imported to."""
    idle: dict[Callable[..., Any], Callable[..., Any]] = {
        rng.key: lambda *fields: 0,
        rng.reseed: lambda seed: None,
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("helios")]
    found = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and value in idle
    ]
    for module, name, value in found:
        setattr(module, name, idle[value])
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Let the error stream be a terminal that somebody reads, as progress bars expect it."""
    reader, writer = pty.openpty()
    found = os.dup(2)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["cat"], stdin=reader, **quiet) as sink:
        os.dup2(writer, 2)
        try:
            yield
        finally:
            os.dup2(found, 2)
            for descriptor in (found, reader, writer):
                os.close(descriptor)
            sink.kill()


def run_with_bar(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the same with a progress bar and a TensorBoard scalar every 50 iterations."""
    with tempfile.TemporaryDirectory() as folder, terminal():
        return run_helios(
            data,
            batch_size,
            last,
            clock,
            enable_progress_bar=True,
            enable_tensorboard=True,
            run_path=Path(folder),
            print_frequency=50,
        )


def run_with_csv(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the same with a row of a CSV file every 50 iterations."""
    with tempfile.TemporaryDirectory() as folder:
        plugins = [CSVLogger(Path(folder) / "log.csv")]
        return run_helios(data, batch_size, last, clock, plugins=plugins, print_frequency=50)


def run_with_folder(ledger: str) -> Mode:
    """Return the same with a folder of checkpoints, of which none is due."""

    def run(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
        with tempfile.TemporaryDirectory() as folder:
            options = {"chkpt_root": Path(folder), "chkpt_frequency": last, "ledger": ledger}
            return run_helios(data, batch_size, last, clock, **options)

    return run


class Deaf(Plugin):
    """A plugin that hears nothing while an epoch runs."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Hear of whole epochs only."""


class Counting(Plugin):
    """A plugin that hears the end of every iteration."""

    unsaved = ("iterations",)

    def setup(self) -> None:
        self.iterations = 0

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.iterations += 1


def run_with_plugins(kind: type[Plugin], number: int) -> Mode:
    """Return the same with some plugins."""

    def run(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
        plugins = [kind(f"plugin-{place}") for place in range(number)]
        return run_helios(data, batch_size, last, clock, plugins=plugins)

    return run


class Pairs(torch.utils.data.Dataset[Any]):
    """The same data as a user's own data set, which may draw random numbers."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def run_on_own_data(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the same on a data set of the user's own."""
    return run_helios(Pairs(data), batch_size, last, clock)


def run_with_log(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the same with one ``self.log`` in each step."""
    return run_helios(data, batch_size, last, clock, Logging)


def run_without_keys(data: TensorDataset, batch_size: int, last: int, clock: Clock) -> float:
    """Return the same with the keyed randomness switched off."""
    with without_keys():
        return run_helios(data, batch_size, last, clock)


class Layers(Timed):
    """A model of many small parameters."""

    def __init__(self, last: int, number: int) -> None:
        super().__init__(last, time.perf_counter)
        self._number = number

    def setup(self, fast_init: bool = False) -> None:
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(self._number)]
        self.network = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)


def count_calls(
    *, num_replicas: int = 1, num_layers: int = 1, is_own: bool = False, iterations: int = 256
) -> collections.Counter[str]:
    """Return how often an iteration enters each function of the package, by file and name.

    Args:
        num_replicas: replicas, all in this process.
        num_layers: layers of the model, with two parameters each.
        is_own: whether the data set is a user's own.
        iterations: how many are counted, in steady state.
    """
    counts: collections.Counter[str] = collections.Counter()
    package = Path(helios.__file__).parent

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(package)):
            # Python 3.10 does not know the class of a method.
            name = getattr(code, "co_qualname", code.co_name)
            counts[f"{Path(code.co_filename).relative_to(package)} {name}"] += 1

    class Counted(Layers):
        def on_training_batch_start(self, state: TrainingState) -> None:
            if state.global_iteration == first:
                sys.setprofile(note)
            if state.global_iteration == first + iterations:
                sys.setprofile(None)
            super().on_training_batch_start(state)

    # What steps change is looked for in iterations at powers of two, so none of these is counted.
    first = 2 * iterations + 1
    last = first + iterations + 1
    data: Any = make_data(last * num_replicas)
    model = Counted(last, num_layers)
    trainer = Trainer(
        train_unit="iteration",
        total_steps=last,
        use_cpu=True,
        print_banner=False,
        num_replicas=num_replicas,
    )
    trainer.fit(model, Data(Pairs(data) if is_own else data, 1))
    return collections.Counter({name: round(n / iterations, 2) for name, n in counts.items()})


def print_calls() -> None:
    """Print how many calls an iteration makes, and where."""
    for text, options in (
        ("one replica", {}),
        ("one replica, a data set of the user's own", {"is_own": True}),
        ("one replica, 100 parameters", {"num_layers": 50}),
        ("two replicas", {"num_replicas": 2}),
        ("two replicas, 100 parameters", {"num_replicas": 2, "num_layers": 50}),
        ("four replicas", {"num_replicas": 4}),
    ):
        counts = count_calls(**options)
        print(f"{text}: {sum(counts.values()):.1f} calls an iteration")
        if options in ({}, {"num_replicas": 2}):
            for name, number in sorted(counts.items()):
                print(f"  {number:7.2f}  {name}")


MODES: dict[str, Mode] = {
    "plain loop": run_plain,
    "Helios without keyed randomness": run_without_keys,
    "Helios": run_helios,
    "Helios, a data set of the user's own": run_on_own_data,
    "Helios, one self.log": run_with_log,
    "Helios, 1 plugin that hears it": run_with_plugins(Counting, 1),
    "Helios, 10 plugins that hear it": run_with_plugins(Counting, 10),
    "Helios, 10 plugins that do not": run_with_plugins(Deaf, 10),
    "Helios, CSV": run_with_csv,
    "Helios, bar and TensorBoard": run_with_bar,
    "Helios, a folder without ledger": run_with_folder("off"),
    "Helios, a folder with ledger": run_with_folder("steps"),
}


def measure(batch_size: int, iterations: int, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Run all modes in turn, several times over."""
    last = WARM_UP + iterations
    data = make_data(last * batch_size)
    times: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(rounds):
        for name, run in MODES.items():
            times[name].append(run(data, batch_size, last, clock))
    return times


def main() -> None:
    """Measure and print one table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cpu-time", action="store_true", help="count processor time")
    parser.add_argument("--calls", action="store_true", help="count calls, and no time")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    if arguments.calls:
        print_calls()
        return
    for batch_size in arguments.batch_sizes:
        times = measure(batch_size, arguments.iterations, arguments.rounds, clock)
        print(f"\nbatch size {batch_size}: microseconds per iteration, {arguments.rounds} rounds")
        print(f"  {'':38}{'median':>9}{'min':>9}{'max':>9}{'over plain':>12}{'ratio':>8}")
        base = statistics.median(times["plain loop"])
        for name, found in times.items():
            middle = statistics.median(found)
            spread = f"{middle:9.1f}{min(found):9.1f}{max(found):9.1f}"
            print(f"  {name:38}{spread}{middle - base:+12.1f}{middle / base:8.2f}")


if __name__ == "__main__":
    main()

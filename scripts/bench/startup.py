"""Seconds that Helios adds to ``import torch``, and to the first training step of a plain script.

Each is measured from the start of a fresh interpreter, in turn; the table shows medians::

    .venv/bin/python scripts/bench/startup.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

IMPORT_TORCH = "import torch"
IMPORT_HELIOS = "import torch, helios"

PLAIN_STEP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
data = TensorDataset(torch.randn(64, 32), torch.randn(64, 32))
network = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
for inputs, targets in DataLoader(data, 8, shuffle=True):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(network(inputs), targets)
    loss.backward()
    optimizer.step()
    break
"""

HELIOS_STEP = """
import logging
import torch
from helios.data.datamodule import DataLoaderParams, DataModule
from helios.model.model import Model
from helios.trainer import Trainer
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

class Data(DataModule):
    def setup(self):
        data = TensorDataset(torch.randn(64, 32), torch.randn(64, 32))
        params = DataLoaderParams(batch_size=8, shuffle=True)
        self._train_dataset = self._create_dataset(data, params)

class Net(Model):
    def setup(self, fast_init=False):
        self.network = torch.nn.Linear(32, 32)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)

    def train_step(self, batch, state):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.network(inputs), targets)

logging.disable(logging.INFO)
Trainer(train_unit="iteration", total_steps=1, use_cpu=True, print_banner=False).fit(
    Net("net"), Data()
)
"""

REACHED = "\nimport os; os.write(1, b'.')"


def seconds(script: str) -> float:
    """Return the time from the start of an interpreter until the script's last line was run."""
    command = [sys.executable, "-c", script + REACHED]
    # Without cached bytecode every start would compile all of Helios, but nothing of PyTorch.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        mark = process.stdout.read(1)
        elapsed = time.perf_counter() - begin
    if mark != b".":
        raise SystemExit("A measured script failed; its error stands above.")
    return elapsed


def main() -> None:
    """Measure and print both differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    pairs = {
        "import": (IMPORT_TORCH, IMPORT_HELIOS),
        "first training step": (PLAIN_STEP, HELIOS_STEP),
    }
    print(f"seconds, median of {rounds} rounds\n{'':24}{'plain':>9}{'Helios':>9}{'over':>9}")
    for name, (plain, ours) in pairs.items():
        seconds(plain), seconds(ours)  # caches of the file system, bytecode
        times = [(seconds(plain), seconds(ours)) for _ in range(rounds)]
        one, two = (statistics.median(side) for side in zip(*times, strict=True))
        print(f"{name:24}{one:9.3f}{two:9.3f}{two - one:+9.3f}")


if __name__ == "__main__":
    main()

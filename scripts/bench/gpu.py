"""What Helios adds to an iteration on a GPU, and for how long a save keeps the training.

A plain loop and Helios train the same network on equal batches from page-locked memory, by AdamW,
in one process and in turn. The table shows medians over rounds; the clock is read after the device
has finished, at the begin and the end of a stretch of iterations only. ``--saves`` also shows how
long single saves of a larger network keep the training, against ``torch.save``::

    .venv/bin/python scripts/bench/gpu.py [--rounds 5] [--networks linear …] [--saves transformer]

Run it on a machine that does nothing else; ``--device cpu`` is there to try the script.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import helios
from helios.plugins import Plugin
from helios.state import TrainingState

MIB = 1 << 20


def make_encoder(width: int, layers: int) -> nn.Module:
    """Return an encoder of vectors of 64 numbers, whose attention has heads of 64."""
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(64, width), encoder, nn.Linear(width, 64))


@dataclass(frozen=True)
class Network:
    """A network, its batches, and how long it is trained.

    Attributes:
        make: returns it.
        shape: of a sample.
        batch_size: samples of a batch.
        precision: of the arithmetic.
        num_workers: loader workers.
        warm_up: iterations before the clock starts.
        iterations: how many are measured.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    precision: str
    num_workers: int
    warm_up: int
    iterations: int

    @property
    def last(self) -> int:
        """The number of iterations of a run."""
        return self.warm_up + self.iterations

    @property
    def save_every(self) -> int:
        """Iterations between two saves, long enough for a thread to write one."""
        return self.iterations // 3


NETWORKS = {
    "linear": Network(lambda: nn.Linear(32, 32), (32,), 8, "fp32", 0, 200, 1500),
    "transformer": Network(lambda: make_encoder(768, 8), (128, 64), 32, "bf16", 2, 20, 60),
    "tiny": Network(lambda: make_encoder(64, 1), (4, 64), 2, "bf16", 2, 5, 60),
}
SAVED = {
    "linear": NETWORKS["linear"],
    "transformer": Network(lambda: make_encoder(1024, 12), (128, 64), 32, "bf16", 2, 10, 210),
    "tiny": NETWORKS["tiny"],
}


class Samples(Dataset[Any]):
    """As many samples as are asked for, which are few tensors again and again."""

    def __init__(self, network: Network) -> None:
        generator = torch.Generator().manual_seed(0)
        self._number = network.last * network.batch_size
        self._kept = torch.randn(64, *network.shape, generator=generator)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._kept[index % 64], self._kept[(index + 1) % 64]


class Data(helios.DataModule):
    """The samples as a data module."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def setup(self) -> None:
        params = helios.DataLoaderParams(
            batch_size=self._network.batch_size, shuffle=True, num_workers=self._network.num_workers
        )
        self._train_dataset = self._create_dataset(Samples(self._network), params)


class Trained(helios.Model):
    """The network as a model."""

    def __init__(self, network: Network) -> None:
        super().__init__("bench")
        self._network = network

    def setup(self, fast_init: bool = False) -> None:
        self.network = self._network.make().to(self.device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.network(inputs), targets)


def read_clock(device: torch.device) -> float:
    """Return the seconds when all that was sent to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stretch(Plugin):
    """Takes the time of the iterations after the warm-up."""

    unsaved = ("begin", "end")

    def __init__(self, network: Network, device: torch.device) -> None:
        super().__init__("stretch")
        self._network, self._device = network, device
        self.begin = self.end = 0.0

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self._network.warm_up:
            self.begin = read_clock(self._device)
        elif state.global_iteration == self._network.last:
            self.end = read_clock(self._device)


class Gaps(Plugin):
    """Takes the time between iterations, on a device that has nothing to do."""

    unsaved = ("begin", "gaps")

    def __init__(self, device: torch.device, every: int, folder: Path | None) -> None:
        super().__init__("gaps")
        self._device, self._every, self._folder = device, every, folder
        self.begin = 0.0
        self.gaps: dict[int, float] = {}

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_start(self, state: TrainingState) -> None:
        if self.begin:
            self.gaps[state.global_iteration - 1] = time.perf_counter() - self.begin

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.begin = read_clock(self._device)
        if self._folder is not None and state.global_iteration % self._every == 0:
            model = self.context.model
            state_dicts = [model.network.state_dict(), model.optimizer.state_dict()]
            torch.save(state_dicts, self._folder / "plain.pt")


def make_trainer(network: Network, device: torch.device, **options: Any) -> helios.Trainer:
    """Return a trainer for all iterations of a network."""
    where: dict[str, Any] = {"gpus": [0]} if device.type == "cuda" else {"use_cpu": True}
    return helios.Trainer(
        train_unit="iteration",
        total_steps=network.last,
        precision=network.precision,
        print_banner=False,
        **where,
        **options,
    )


def run_plain(network: Network, device: torch.device) -> float:
    """Return the seconds of an iteration of a plain loop."""
    net = network.make().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    loader = DataLoader(
        Samples(network),
        network.batch_size,
        shuffle=True,
        num_workers=network.num_workers,
        pin_memory=device.type == "cuda",
    )
    begin = 0.0
    for number, batch in enumerate(loader, 1):
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=network.precision == "bf16"):
            loss = mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == network.warm_up:
            begin = read_clock(device)
    return (read_clock(device) - begin) / network.iterations


def run_helios(network: Network, device: torch.device, **options: Any) -> float:
    """Return the seconds of an iteration of the same training by Helios."""
    stretch = Stretch(network, device)
    trainer = make_trainer(network, device, plugins=[stretch], **options)
    trainer.fit(Trained(network), Data(network))
    return (stretch.end - stretch.begin) / network.iterations


def run_with_folder(network: Network, device: torch.device, ledger: str) -> float:
    """Return the same with a folder for checkpoints, of which none is due."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"chkpt_root": folder, "chkpt_frequency": network.last, "ledger": ledger}
        return run_helios(network, device, **options)


MODES: dict[str, Callable[[Network, torch.device], float]] = {
    "plain loop": run_plain,
    "Helios": run_helios,
    "Helios, deterministic": lambda *where: run_helios(*where, enable_deterministic=True),
    "Helios, a folder without ledger": lambda *where: run_with_folder(*where, "off"),
    "Helios, a folder with ledger": lambda *where: run_with_folder(*where, "steps"),
}


def show_iterations(name: str, device: torch.device, rounds: int) -> None:
    """Measure all modes in turn, several times over, and print a table."""
    network, times = NETWORKS[name], dict[str, list[float]]()
    for _ in range(rounds):
        for mode, run in MODES.items():
            gc.collect()  # of the run before
            times.setdefault(mode, []).append(1e6 * run(network, device))
    base = statistics.median(times["plain loop"])
    print(f"\n{name}: microseconds of an iteration, {rounds} rounds")
    print(f"  {'':34}{'median':>10}{'min':>10}{'max':>10}{'over plain':>12}{'ratio':>8}")
    for mode, found in times.items():
        middle = statistics.median(found)
        spread = f"{middle:10.1f}{min(found):10.1f}{max(found):10.1f}"
        print(f"  {mode:34}{spread}{middle - base:+12.1f}{middle / base:8.3f}", flush=True)


def measure_saves(network: Network, device: torch.device, way: str) -> tuple[list[float], float]:
    """Return the milliseconds for which each save keeps the training, and the peak of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    every = network.save_every
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if way in ("async", "sync"):
            store = helios.CheckpointStore(is_async=way == "async", keep_last=1)
            options = {"chkpt_root": folder, "chkpt_frequency": every, "store": store}
        gaps = Gaps(device, every, Path(folder) if way == "torch.save" else None)
        make_trainer(network, device, plugins=[gaps], **options).fit(
            Trained(network), Data(network)
        )
    saved = [gap for number, gap in gaps.gaps.items() if number % every == 0]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return [1e3 * gap for gap in saved], peak / MIB


def show_saves(name: str, device: torch.device) -> None:
    """Measure each way to save once, and print a table."""
    network = SAVED[name]
    number = sum(part.numel() for part in network.make().parameters())
    print(f"\n{name}, {number / 1e6:.0f} million parameters: milliseconds between two iterations")
    print(f"  {'':12}{'first':>10}{'median':>10}{'max':>10}{'MiB of the device':>20}")
    for way in ("async", "sync", "torch.save"):
        found, peak = measure_saves(network, device, way)
        rest = found[1:] or found
        numbers = f"{found[0]:10.1f}{statistics.median(rest):10.1f}{max(rest):10.1f}{peak:20.0f}"
        print(f"  {way:12}{numbers}", flush=True)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--rounds", type=int, default=5)
    names = ["linear", "transformer"]
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=names)
    parser.add_argument("--saves", choices=list(SAVED), help="the network of which saves are timed")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA reads it when it starts
    device = arguments.device
    is_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if is_gpu else device.type
    print(f"PyTorch {torch.__version__} on {kind}")
    if arguments.saves:
        show_saves(arguments.saves, device)
    for name in arguments.networks:
        show_iterations(name, device, arguments.rounds)


if __name__ == "__main__":
    main()

"""Milliseconds of a training step on several processes, against stock DistributedDataParallel.

The network is an MLP of 10 million parameters, trained by SGD with momentum over gloo, one thread a
process, one replica each. ``ddp`` is a plain loop over DDP; ``helios`` is ``Trainer.fit``, with
keys, counters, hooks, buffers, the exchange of losses and of decisions. Both take turns in the same
processes (A B A B), the table shows the median step of each and the ratio::

    .venv/bin/python scripts/bench/ddp_step.py [--ranks 2 4] [--batches 256 64] [--rounds 4]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import helios
from helios.core.group import DistributedInfo, join_group, leave_group
from helios.plugins import Plugin

WIDTH, HIDDEN, CLASSES = 784, 2304, 10
WARM_UP, STEPS = 3, 12


class Vectors(Dataset):
    """Rows of numbers, fetched a batch at a time, so that fetching costs little."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(1024, WIDTH, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.tensor(indices)
        return self.rows[places % 1024], places % CLASSES


def as_it_is(batch: Any) -> Any:
    return batch


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(WIDTH, HIDDEN), nn.ReLU()]
    parts += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1280), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(1280, CLASSES))


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


class Net(helios.Model):
    """The network in a trainer."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = make_network()
        self.optimizer = make_optimizer(self.net)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)


class Data(helios.DataModule):
    """The rows in a trainer."""

    def __init__(self, length: int, batch_size: int) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self) -> None:
        params = helios.DataLoaderParams(
            batch_size=self.batch_size, shuffle=True, collate_fn=as_it_is
        )
        self._train_dataset = self._create_dataset(Vectors(self.length), params)


class Clock(Plugin):
    """Notes the time after each batch."""

    unsaved = ("moments",)

    def __init__(self) -> None:
        super().__init__("clock")
        self.moments: list[float] = []

    def setup(self) -> None:
        """Begin anew."""
        self.moments = []

    def on_training_step_end(self, state: helios.TrainingState, committed: bool) -> None:
        self.moments.append(time.perf_counter())


def steps_of(moments: list[float]) -> list[float]:
    pairs = zip(moments[WARM_UP:-1], moments[WARM_UP + 1 :], strict=True)
    return [(after - before) * 1e3 for before, after in pairs]


def measure_helios(num_ranks: int, batch_size: int) -> list[float]:
    clock = Clock()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=WARM_UP + STEPS,
        num_replicas=num_ranks,
        use_cpu=True,
        print_banner=False,
        plugins=[clock],
    )
    trainer.fit(Net("bench"), Data(num_ranks * batch_size * 64, batch_size))
    return steps_of(clock.moments)


def measure_ddp(num_ranks: int, batch_size: int) -> list[float]:
    network = DistributedDataParallel(make_network())
    optimizer = make_optimizer(network)
    data = Vectors(num_ranks * batch_size * 64)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=as_it_is)
    moments = []
    for rows, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(rows), labels).backward()
        optimizer.step()
        moments.append(time.perf_counter())
        if len(moments) == WARM_UP + STEPS:
            break
    return steps_of(moments)


def work(rank: int, num_ranks: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.disable()
    info = DistributedInfo(rank, rank, num_ranks, num_ranks)
    join_group(info, backend="gloo", meeting=Path(store).as_uri())
    for batch_size in options.batches:
        times: dict[str, list[float]] = {"ddp": [], "helios": []}
        for _ in range(options.rounds):
            times["ddp"] += measure_ddp(num_ranks, batch_size)
            times["helios"] += measure_helios(num_ranks, batch_size)
        if rank == 0:
            ddp, ours = (statistics.median(times[name]) for name in ("ddp", "helios"))
            row = f"{num_ranks:6}{batch_size:8}{ddp:12.1f}{ours:12.1f}{ours / ddp:9.2f}"
            print(row, flush=True)
    leave_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    count = sum(parameter.numel() for parameter in make_network().parameters())
    print(f"{count / 1e6:.1f} M parameters; milliseconds of a step")
    print(f"{'ranks':>6}{'batch':>8}{'ddp':>12}{'helios':>12}{'ratio':>9}")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (num_ranks, str(Path(folder, "store")), options), num_ranks)


if __name__ == "__main__":
    main()

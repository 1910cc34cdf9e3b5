"""Milliseconds of a training step on several processes, against stock DistributedDataParallel.

The network is an MLP of 10 million parameters (``--small``: of 10,000), trained by SGD with
momentum over gloo, one thread a process, one replica each. ``ddp`` is a plain loop over DDP;
``helios`` is ``Trainer.fit``, with keys, counters, buffers, the exchange of losses and of
decisions; ``heard`` is the same with a plugin that hears the end of each step and could ask for
something there, for which the processes agree once more. All take turns in the same processes
(A B C A B C), the table shows the median step of each, its quartiles, and the ratio to DDP::

    .venv/bin/python scripts/bench/ddp_step.py [--ranks 2 4] [--batches 256 64] [--rounds 4]
        [--small] [--steps 12]
"""

from __future__ import annotations

import argparse
import dataclasses
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
from helios.distributed.process_groups import DistributedInfo, join_group, leave_group
from helios.plugins import Plugin

LARGE, SMALL = (784, 2304, 1280), (48, 72, 24)
CLASSES = 10
WARM_UP = 3


class Vectors(Dataset):
    """Rows of numbers, fetched a batch at a time, so that fetching costs little."""

    def __init__(self, length: int, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(1024, width, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.tensor(indices)
        return self.rows[places % 1024], places % CLASSES


def as_it_is(batch: Any) -> Any:
    return batch


def make_network(sizes: tuple[int, int, int]) -> nn.Sequential:
    torch.manual_seed(0)
    width, hidden, last = sizes
    parts: list[nn.Module] = [nn.Linear(width, hidden), nn.ReLU()]
    parts += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, last), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(last, CLASSES))


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


class Net(helios.Model):
    """The network in a trainer; notes when each step begins."""

    unsaved = ("moments",)

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        super().__init__("bench")
        self.sizes = sizes
        self.moments: list[float] = []

    def setup(self, fast_init: bool = False) -> None:
        self.net = make_network(self.sizes)
        self.optimizer = make_optimizer(self.net)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        self.moments.append(time.perf_counter())
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)


class Data(helios.DataModule):
    """The rows in a trainer."""

    def __init__(self, vectors: Vectors, batch_size: int) -> None:
        super().__init__()
        self.vectors, self.batch_size = vectors, batch_size

    def setup(self) -> None:
        params = helios.DataLoaderParams(
            batch_size=self.batch_size, shuffle=True, collate_fn=as_it_is
        )
        self._train_dataset = self._create_dataset(self.vectors, params)


class Hearer(Plugin):
    """Hears that a step ends."""

    def __init__(self) -> None:
        super().__init__("hearer")

    def setup(self) -> None:
        """Need nothing."""

    def on_training_step_end(self, state: helios.TrainingState, committed: bool) -> None:
        return


def steps_of(moments: list[float]) -> list[float]:
    pairs = zip(moments[WARM_UP:-1], moments[WARM_UP + 1 :], strict=True)
    return [(after - before) * 1e3 for before, after in pairs]


def measure_helios(run: Run, *plugins: Plugin) -> list[float]:
    model = Net(run.sizes)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=run.num_steps,
        num_replicas=run.num_ranks,
        use_cpu=True,
        print_banner=False,
        plugins=plugins,
    )
    trainer.fit(model, Data(run.make_data(), run.batch_size))
    return steps_of(model.moments)


def measure_ddp(run: Run) -> list[float]:
    network = DistributedDataParallel(make_network(run.sizes))
    optimizer = make_optimizer(network)
    data = run.make_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=run.batch_size, sampler=sampler, collate_fn=as_it_is)
    moments = []
    for rows, labels in loader:
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(rows), labels).backward()
        optimizer.step()
        if len(moments) == run.num_steps:
            break
    return steps_of(moments)


@dataclasses.dataclass(frozen=True)
class Run:
    """What is measured."""

    num_ranks: int
    batch_size: int
    sizes: tuple[int, int, int]
    num_steps: int

    def make_data(self) -> Vectors:
        return Vectors(self.num_ranks * self.batch_size * (self.num_steps + 1), self.sizes[0])


def work(rank: int, num_ranks: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.disable()
    info = DistributedInfo(rank, rank, num_ranks, num_ranks)
    join_group(info, backend="gloo", meeting=Path(store).as_uri())
    for batch_size in options.batches:
        sizes = SMALL if options.small else LARGE
        run = Run(num_ranks, batch_size, sizes, WARM_UP + options.steps)
        times: dict[str, list[float]] = {"ddp": [], "helios": [], "heard": []}
        for _ in range(options.rounds):
            times["ddp"] += measure_ddp(run)
            times["helios"] += measure_helios(run)
            times["heard"] += measure_helios(run, Hearer())
        if rank == 0:
            show(run, times)
    leave_group()


def show(run: Run, times: dict[str, list[float]]) -> None:
    usual = statistics.median(times["ddp"])
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        row = f"{run.num_ranks:6}{run.batch_size:8}  {name:8}{middle:10.3f}"
        print(f"{row}{low:10.3f}{high:10.3f}{middle / usual:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a network of 10,000 parameters")
    options = parser.parse_args()
    network = make_network(SMALL if options.small else LARGE)
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{count:,} parameters; milliseconds of a step")
    print(f"{'ranks':>6}{'batch':>8}  {'':8}{'median':>10}{'25 %':>10}{'75 %':>10}{'ratio':>8}")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (num_ranks, str(Path(folder, "store")), options), num_ranks)


if __name__ == "__main__":
    main()

"""Measures the memory that a start takes: models that ``setup`` builds whole, and by keys.

``python scripts/bench/keyed_init.py [processes]``, by default 4, on the CPU. A model of 12 blocks,
sharded, AdamW. Each start has new processes; the table shows by how much their resident memory has
grown at most before training begins, at a first start and at a resume, for the largest of them,
beside the bytes of its shards and of a unit. At a resume, the files of the checkpoint are mapped;
their pages, which the system may drop, are in the sum only.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import helios
from helios.launch.spawning import spawn
from helios.plugins import Plugin

WIDTH, BLOCKS = 1024, 12


class Block(nn.Module):
    """A block of 32 MiB."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Large(helios.Model):
    """A chain of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__("large")
        self.width = width

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(*(Block(self.width) for _ in range(BLOCKS)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)

    def shard(self) -> list[nn.Module]:
        return [*self.net]

    def train_step(self, batch: Tensor, state: helios.TrainingState) -> Tensor:
        return self.net(batch).square().mean()


class Data(helios.DataModule):
    """Equal vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=1)
        self._train_dataset = self._create_dataset(torch.ones(64, self.width), params)


class Peak(Plugin):
    """Samples the resident memory of this process until training begins."""

    def __init__(self) -> None:
        super().__init__("peak")
        self.before, self.grown = read_memory(), [0, 0]
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    unsaved = ("grown", "is_over", "thread")

    def setup(self) -> None:
        """Nothing to prepare."""

    def sample(self) -> None:
        """Keep the largest growth, of anonymous memory and of all."""
        while not self.is_over.wait(0.001):
            grown = [now - then for now, then in zip(read_memory(), self.before, strict=True)]
            self.grown = list(map(max, grown, self.grown))

    def on_training_start(self) -> None:
        self.is_over.set()
        self.thread.join()


def read_memory() -> list[int]:
    """Return the anonymous and all resident memory of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return [int(found[name].split()[0]) >> 10 for name in ("RssAnon", "VmRSS")]


def start(rank: int, folder: str, init: str, total_steps: int) -> list[int]:
    torch.set_num_threads(1)
    options = {
        "train_unit": "iteration",
        "sharding": "full",
        "init": init,
        "use_cpu": True,
        "print_banner": False,
    }
    # What is imported when it is first used is no part of a model.
    helios.Trainer(total_steps=1, **options).fit(Large(8), Data(8))
    peak = Peak()
    trainer = helios.Trainer(
        total_steps=total_steps,
        chkpt_root=folder,
        chkpt_frequency=1,
        # The memory for copies of shards would be allocated before training begins.
        store=helios.CheckpointStore(is_async=False),
        plugins=[peak],
        **options,
    )
    trainer.fit(Large(WIDTH), Data(WIDTH))
    return peak.grown


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    unit = sum(part.nbytes for part in Block(WIDTH).parameters()) >> 20
    shards = unit * BLOCKS // count
    print(
        f"whole {unit * BLOCKS} MiB, shards {shards} MiB, with AdamW {3 * shards} MiB, unit {unit}"
    )
    # Else memory that is freed stays with the process, in an order that differs from run to run.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    print("| init | first start | resume | with pages of files |")
    print("|---|---:|---:|---:|")
    for init in ("setup", "keyed"):
        with tempfile.TemporaryDirectory() as folder:
            first, then = (spawn(start, count, (folder, init, steps)) for steps in (1, 2))
        (own, _), (resumed, mapped) = (map(max, zip(*each, strict=True)) for each in (first, then))
        print(f"| {init} | {own} MiB | {resumed} MiB | {mapped} MiB |", flush=True)


if __name__ == "__main__":
    main()

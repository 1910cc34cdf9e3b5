"""Seconds of what is copied in each window or forward, and put back.

``NaNGuard`` keeps the buffers of a window, a process with two replicas exchanges them between
turns, and units with ``checkpoint=True`` compute activations again from what they started with.
Each program runs in a process of its own; the table shows the least of all rounds::

    .venv/bin/python scripts/bench/copies.py

With ``--against`` the same programs also run on the package of another checkout, in turn::

    git worktree add ../before <commit>
    .venv/bin/python scripts/bench/copies.py --against ../before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

from helios.replicas.module_buffers import Buffers, ReplicaBuffers
from helios.replicas.replicas import Replicas
from helios.sharding.recomputation import recomputed

HERE = Path(__file__).resolve().parents[2]
NUM_NORMS, WIDTH, NUM_BLOCKS = 60, 64, 4
NUM_CALLS = 200


class Block(nn.Module):
    """A layer of a transformer, and a norm that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return as many tokens as there were."""
        normed: torch.Tensor = self.norm(self.layer(inputs).transpose(1, 2)).transpose(1, 2)
        return normed


def norms() -> nn.Module:
    """Return a network with as many buffers as a residual network of 53 layers has."""
    return nn.Sequential(*(nn.BatchNorm2d(WIDTH) for _ in range(NUM_NORMS)))


def guarded_window() -> Callable[[], object]:
    """Return what ``NaNGuard(action="skip")`` does at the beginning of a window."""
    return Buffers([norms()]).copies


def skipped_window() -> Callable[[], object]:
    """Return what it does when a window is skipped."""
    buffers = Buffers([norms()])
    return partial(buffers.put, buffers.copies())


def two_replicas() -> Callable[[], object]:
    """Return what happens to buffers in a window of two replicas."""
    replicas = Replicas(2)
    buffers = ReplicaBuffers(replicas)
    buffers.find([norms()])

    def window() -> None:
        buffers.begin_window()
        for replica in replicas.local_replicas:
            buffers.enter(replica)
            buffers.leave(replica)
        buffers.commit()

    return window


def computed_again() -> Callable[[], object]:
    """Return an iteration whose activations are computed again in backward."""
    torch.manual_seed(0)
    network = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    inputs = torch.randn(2, 8, WIDTH)
    modules = {str(number): block for number, block in enumerate(network)}

    def iterate() -> None:
        with recomputed(modules):
            network(inputs).square().mean().backward()

    return iterate


PROGRAMS: dict[str, Callable[[], Callable[[], object]]] = {
    "NaNGuard, a window": guarded_window,
    "NaNGuard, skipping one": skipped_window,
    "two replicas, a window": two_replicas,
    "computed again": computed_again,
}


def time_program(name: str) -> float:
    """Return the median seconds of a call, in this process."""
    torch.set_num_threads(1)
    call = PROGRAMS[name]()
    times = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times)


def time_apart(name: str, checkout: Path) -> float:
    """Return the same from a new process, with the package of a checkout."""
    command = [sys.executable, __file__, "--program", name]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    found: float = json.loads(output)
    return found


def measure(names: list[str], checkouts: list[Path], rounds: int) -> None:
    """Print the least time of each program on each checkout, and the ratio to the last one."""
    heads = "".join(
        f"{title:>10}" for title in ("this", "other", "ratio")[: 2 * len(checkouts) - 1]
    )
    print(f"{'µs':<26}{heads}")
    for name in names:
        turns = [[time_apart(name, each) for each in checkouts] for _ in range(rounds)]
        least = [min(times) for times in zip(*turns, strict=True)]
        texts = "".join(f"{1e6 * each:>10.1f}" for each in least)
        print(f"{name:<26}{texts}" + (f"{least[0] / least[1]:>10.2f}" if least[1:] else ""))


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("--against", type=Path, help="another checkout of the repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("names", nargs="*", help=f"programs: {', '.join(PROGRAMS)}")
    options = parser.parse_args()
    if options.program:
        print(json.dumps(time_program(options.program)))
        return
    others = [options.against.resolve()] if options.against else []
    measure(options.names or list(PROGRAMS), [HERE, *others], options.rounds)


if __name__ == "__main__":
    main()

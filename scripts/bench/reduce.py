"""Milliseconds of the fixed-order sum over processes, against gloo's all_reduce.

Both add float32 tensors in place, one replica a process, one thread each, in turn (A B A B); the
table shows a quantile of the milliseconds (the median; a lower one on a busy machine) and their
ratio. ``chunks`` is the way that numbers of processes take that are no power of two. ``leaf`` is
what one more replica in a process costs: collecting the gradients of 100 parameters of the same
size together, and adding them to another leaf::

    .venv/bin/python scripts/bench/reduce.py [--ranks 2 4] [--megabytes 1 10 100] [--quantile 0.5]
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helios.replicas.flat_gradients import FlatGradients
from helios.replicas.tree_reducer import TreeReducer

WARM_UP = 3
NUM_PARAMETERS = 100


@dataclasses.dataclass(frozen=True)
class Options:
    """How often to measure, and which of the sorted times to show."""

    repeats: int
    quantile: float


def measure_ways(ways: dict[str, Callable[[], object]], options: Options) -> dict[str, float]:
    """Return the milliseconds of each way, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + options.repeats):
        for name, act in ways.items():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            act()
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - begin) * 1e3)
    place = int(options.quantile * (options.repeats - 1))
    return {name: sorted(found)[place] for name, found in times.items()}


def measure(rank: int, num_ranks: int, store: str, megabytes: float, options: Options) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    own = torch.empty(int(megabytes * 1e6) // 4).fill_(0.0)
    usual = TreeReducer(num_ranks, num_processes=num_ranks, rank=rank)
    chunked = TreeReducer(num_ranks, num_processes=num_ranks, rank=rank)
    chunked._distances = None  # noqa: SLF001
    node = range(rank, rank + 1)
    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(own),
        "tree": lambda: usual.all_reduce({node: own}),
        "chunks": lambda: chunked.all_reduce({node: own}),
    }
    found = measure_ways(ways, options)
    if rank == 0:
        stock = found["all_reduce"]
        columns = (f"{found[way]:>9.2f} {found[way] / stock:>6.2f}" for way in ("tree", "chunks"))
        print(f"{num_ranks:>5} {megabytes:>8g} {stock:>12.2f}", *columns, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure_leaf(megabytes: float, options: Options) -> None:
    """Print what collecting and adding a leaf takes, in one process."""
    torch.set_num_threads(1)
    size = int(megabytes * 1e6) // 4 // NUM_PARAMETERS
    parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(NUM_PARAMETERS)]
    gradients = [torch.zeros(size) for _ in parameters]
    flat = FlatGradients((str(number), p) for number, p in enumerate(parameters))

    def collect() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        taken.append(flat.move_all())

    def add() -> None:
        flat.add(taken[0], taken.pop())

    taken = [flat.move_all()]
    found = measure_ways({"collect": collect, "add": add}, options)
    print(f"leaf  {megabytes:>8g} collect {found['collect']:.2f} add {found['add']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--quantile", type=float, default=0.5)
    arguments = parser.parse_args()
    print(
        f"{'ranks':>5} {'MB':>8} {'all_reduce':>12} {'tree':>9} {'ratio':>6} "
        f"{'chunks':>9} {'ratio':>6}   [ms]"
    )
    for num_ranks in arguments.ranks:
        for megabytes in arguments.megabytes:
            options = Options(max(11, min(200, int(300 / megabytes))), arguments.quantile)
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                mp.spawn(measure, (num_ranks, store, megabytes, options), nprocs=num_ranks)
    for megabytes in arguments.megabytes:
        measure_leaf(megabytes, Options(20, arguments.quantile))


if __name__ == "__main__":
    main()

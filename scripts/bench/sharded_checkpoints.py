"""Time sharded checkpoints against PyTorch's distributed checkpoints, on several processes.

Prints, for saving and loading, the time of the slowest process and the processor time of all of
them, ours over theirs; and how long training is blocked by a save in the background, in copies of
what each process holds. Both write to the same folder, and take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helios.checkpoint.rank_part import OwnRows, PartWriter, RankPart, SavePlan, split_sharded
from helios.checkpoint.sharded_commit import RankParts
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from helios.checkpoint import loading
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import PendingCheckpoint, RunFolder
from helios.core.sharded_tensors import RowShare, cut_like
from helios.sharding.fsdp_adapter import make_mesh, shard_unit


def build(width: int, num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded network, and an optimizer that has made a step."""
    network = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    mesh = make_mesh(torch.device("cpu"), dist.get_world_size())
    for module in (*network, network):
        shard_unit(module, mesh)
    optimizer = torch.optim.AdamW(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return network, optimizer


def make_payload(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the record of a training that has nothing else."""
    objects = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    return {
        "schema": 2,
        "version": "",
        "training_state": {"global_epoch": 1, "global_iteration": 1},
        "cursor": {"epoch": 0, "batch": 1},
        "model": {"objects": objects, "flags": {}, "parameters": {}},
        "rng": {},
        "num_replicas": dist.get_world_size(),
    }


class Ours:
    """Saves and loads as Helios does."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.plan = SavePlan(root / "run_epoch_1_iter_1.ckpt", "bench", self.count, hashes=True)

    def save(self, payload: dict[str, Any]) -> None:
        payload, rows = split_sharded(payload)
        self.write(payload, rows)
        dist.barrier()

    def write(self, payload: dict[str, Any], rows: dict[str, OwnRows]) -> None:
        part = RankPart(self.plan, self.rank, rows)
        if self.rank:
            part.publish()
            return
        sidecar = Sidecar("run", self.count, 1, 1)
        parts = RankParts(part, lambda: False)
        pending = PendingCheckpoint(self.plan.path, payload, sidecar, parts=parts)
        pending.encode()
        self.folder.commit(pending)

    def load(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        share = RowShare(self.rank, self.count)
        objects = loading.load(self.plan.path, maps=True, share=share).payload["model"]["objects"]
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(cut_like(objects["network"][name], parameter))
            for number, parameter in enumerate(network.parameters()):
                for key, value in objects["optimizer"]["state"][number].items():
                    own = optimizer.state[parameter][key]
                    own.copy_(cut_like(value, own))
        dist.barrier()


class Theirs:
    """Saves and loads as torch.distributed.checkpoint does."""

    def __init__(self, root: Path) -> None:
        self.path = root / "dcp"

    def save(self, state: dict[str, Any]) -> None:
        dcp.save(state, checkpoint_id=self.path)

    def load(self, state: dict[str, Any]) -> None:
        dcp.load(state, checkpoint_id=self.path)


def measure(work: Callable[[], None]) -> tuple[float, float]:
    """Return the time of the slowest process, and the processor time of all."""
    gc.collect()
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    found = torch.tensor([time.perf_counter() - begin])
    spent = torch.tensor([time.process_time() - cpu])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return found.item(), spent.item()


def measure_blocked(payload: dict[str, Any], plan: SavePlan) -> tuple[float, float]:
    """Return how long a copy of the shards takes, and what a save in the background does first."""
    writer = PartWriter(dist.get_rank(), is_async=True, pins=False)
    writer.draft(plan, split_sharded(payload)[1])
    shards = [own.tensor for own in split_sharded(payload)[1].values()]
    targets = [shard.clone() for shard in shards]

    def copy() -> None:
        for target, shard in zip(targets, shards, strict=True):
            target.copy_(shard)

    copies = min(measure(copy)[0] for _ in range(5))
    blocked = min(
        measure(lambda: writer.draft(plan, split_sharded(payload)[1]) and None)[0] for _ in range(5)
    )
    writer.thread.close()
    return copies, blocked


def run(rank: int, count: int, root: str, options: argparse.Namespace) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    network, optimizer = build(options.width, options.layers)
    ours, theirs = Ours(Path(root)), Theirs(Path(root))
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        if rank == 0:
            for path in (ours.plan.path, theirs.path):
                shutil.rmtree(path, ignore_errors=True)
        payload = make_payload(network, optimizer)
        model, optim = get_state_dict(network, optimizer)
        state = {"model": model, "optim": optim}
        for name, work in (
            ("save", lambda payload=payload: ours.save(payload)),
            ("dcp save", lambda state=state: theirs.save(state)),
            ("load", lambda: ours.load(network, optimizer)),
            ("dcp load", lambda state=state: theirs.load(state)),
        ):
            found.setdefault(name, []).append(measure(work))
    copies, blocked = measure_blocked(make_payload(network, optimizer), ours.plan)
    if rank == 0:
        num_bytes = 3 * sum(part.numel() * 4 for part in network.parameters())
        medians = {
            k: [round(statistics.median(c), 3) for c in zip(*v, strict=True)]
            for k, v in found.items()
        }
        ratios = {
            name: [
                round(a / b, 2) for a, b in zip(medians[name], medians[f"dcp {name}"], strict=True)
            ]
            for name in ("save", "load")
        }
        print(json.dumps({"processes": count, "megabytes": round(num_bytes / 1e6), **medians}))
        print(json.dumps({"wall and processor time over dcp": ratios}))
        print(json.dumps({"copy": copies, "blocked": blocked, "copies": blocked / copies}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", help="where to write; a disk, or memory")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        arguments = (options.processes, root, options)
        multiprocessing.start_processes(run, arguments, options.processes, start_method="spawn")


if __name__ == "__main__":
    main()

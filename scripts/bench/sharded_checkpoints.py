"""Time sharded checkpoints against PyTorch's distributed checkpoints, on several processes.

Prints, for saving and loading, the time of the slowest process, the processor time of all of them
and the memory that one of them needs for it; each as ours over theirs, with digests and without.
Also how long hashing all files takes, and how long training is blocked by a save in the background,
in copies of what each process holds. All write to the same folder, and take turns.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from helios.checkpoint import loading
from helios.checkpoint.retention import CheckpointStore
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import PendingCheckpoint, RunFolder
from helios.core.sharded_tensors import RowShare, cut_like
from helios.distributed import process_groups
from helios.sharding.fsdp_adapter import make_mesh, shard_unit
from helios.storage import files
from helios.storage.dcp_folder import copy_rows, save_rows, split_sharded
from helios.storage.files import digest_file
from helios.storage.staging import HostBuffers


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
        "schema": 5,
        "version": "",
        "training_state": {"global_epoch": 1, "global_iteration": 1},
        "cursor": {"epoch": 0, "batch": 1},
        "model": {"objects": objects, "flags": {}, "parameters": {}},
        "rng": {},
        "num_replicas": dist.get_world_size(),
    }


class Ours:
    """Saves and loads as Helios does."""

    def __init__(self, root: Path, *, hashes: bool) -> None:
        self.folder = RunFolder(root / f"ours-{hashes}", CheckpointStore(digest=hashes))
        self.path = self.folder.path / "run_epoch_1_iter_1.ckpt"
        self.share = RowShare(dist.get_rank(), dist.get_world_size())
        self.group, self.hashes = process_groups.saving_group(), hashes

    def save(self, payload: dict[str, Any]) -> None:
        payload, rows = split_sharded(payload)
        draft = files.temporary_path(self.path)
        written = save_rows(draft, rows, self.group, hashes=self.hashes)
        if self.share.rank == 0:
            sidecar = Sidecar("run", self.share.num_processes, 1, 1)
            pending = PendingCheckpoint(self.path, payload, sidecar, rows=written)
            pending.encode()
            self.folder.commit(pending)
        dist.barrier()

    def load(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loaded = loading.load(self.path, maps=True, share=self.share)
        objects = loaded.payload["model"]["objects"]
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(cut_like(objects["network"][name], parameter))
            for number, parameter in enumerate(network.parameters()):
                # As load_state_dict of an optimizer.
                state = optimizer.state[parameter]
                for key, value in objects["optimizer"]["state"][number].items():
                    state[key] = cut_like(value, state[key])
        dist.barrier()

    def hash(self) -> None:
        """Hash this process's part of the files."""
        for path in sorted(self.path.iterdir())[self.share.rank :: self.share.num_processes]:
            digest_file(path)


def load_theirs(state: dict[str, Any], path: Path) -> None:
    """Load as a start does: the state of the optimizer is new memory, as in ours."""
    tables = state["optim"]["state"]
    for name, table in tables.items():
        tables[name] = {key: torch.empty_like(value) for key, value in table.items()}
    dcp.load(state, checkpoint_id=path)


def measure(work: Callable[[], None]) -> tuple[float, float, float]:
    """Return the time of the slowest process, the processor time of all, and MB of memory."""
    gc.collect()
    # The peak of this process begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    resident = read_memory("VmRSS")
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    found = torch.tensor([time.perf_counter() - begin, read_memory("VmHWM") - resident])
    spent = torch.tensor([time.process_time() - cpu])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return found[0].item(), spent.item(), found[1].item()


def read_memory(kind: str) -> float:
    """Return a figure of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1e3


def measure_blocked(payload: dict[str, Any]) -> tuple[float, float]:
    """Return how long a copy of the shards takes, and what a save in the background does first."""
    buffers = HostBuffers()
    copy_rows(split_sharded(payload)[1], buffers)
    shards = [own.tensor for own in split_sharded(payload)[1].values()]
    targets = [shard.clone() for shard in shards]

    def copy() -> None:
        for target, shard in zip(targets, shards, strict=True):
            target.copy_(shard)

    def block() -> None:
        copy_rows(split_sharded(payload)[1], buffers)

    return min(measure(copy)[0] for _ in range(5)), min(measure(block)[0] for _ in range(5))


def run(rank: int, count: int, root: str, options: argparse.Namespace) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    info = process_groups.DistributedInfo(rank, rank, count, count)
    with process_groups.membership(info, backend="gloo", meeting=f"file://{root}/store"):
        compare(rank, count, root, options)


def compare(rank: int, count: int, root: str, options: argparse.Namespace) -> None:
    """Measure inside the process group."""
    network, optimizer = build(options.width, options.layers)
    theirs = Path(root) / "dcp"
    ours = {hashes: Ours(Path(root), hashes=hashes) for hashes in (False, True)}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        if rank == 0:
            for path in (ours[False].path, ours[True].path, theirs):
                shutil.rmtree(path, ignore_errors=True)
        payload = make_payload(network, optimizer)
        model, optim = get_state_dict(network, optimizer)
        state = {"model": model, "optim": optim}
        for name, work in {
            "save": partial(ours[False].save, payload),
            "save with digests": partial(ours[True].save, payload),
            "dcp save": partial(dcp.save, state, checkpoint_id=theirs),
            "load": partial(ours[False].load, network, optimizer),
            "load with digests": partial(ours[True].load, network, optimizer),
            "dcp load": partial(load_theirs, state, theirs),
            "hash": ours[True].hash,
        }.items():
            found.setdefault(name, []).append(measure(work))
    copies, blocked = measure_blocked(make_payload(network, optimizer))
    if rank == 0:
        num_bytes = 3 * sum(part.numel() * 4 for part in network.parameters())
        medians = {
            k: [round(statistics.median(c), 3) for c in zip(*v, strict=True)]
            for k, v in found.items()
        }
        ratios = {
            name: [
                round(a / b, 2) if b else None
                for a, b in zip(medians[name], medians[f"dcp {name.split()[0]}"], strict=True)
            ]
            for name in ("save", "save with digests", "load", "load with digests")
        }
        print(json.dumps({"processes": count, "megabytes": round(num_bytes / 1e6), **medians}))
        print(json.dumps({"time, processor time and memory over dcp": ratios}))
        print(json.dumps({"copy": copies, "blocked": blocked, "copies": blocked / copies}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--root", help="where to write; a disk, or memory")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        arguments = (options.processes, root, options)
        multiprocessing.start_processes(run, arguments, options.processes, start_method="spawn")


if __name__ == "__main__":
    main()

"""What a save costs a training, and what a load takes, against what the machine can do at best.

A plain loop trains an MLP of 40 million float32 parameters with Adam (458 MiB of state) and saves
now and then. Each way runs in a process of its own, in turn, and shows

- ``first``, ``blocked``: seconds for which the first save, and a later one, keep the training;
- ``lost``: seconds a save, total time of the run less that of one that does not save;
- ``memory``: MiB at the peak above the run that does not save.

``copy`` copies into ready buffers; ``raw`` writes, fsyncs and hashes as many bytes::

    .venv/bin/python scripts/bench/checkpoint.py [--rounds 3] [--ways async sync …] [--folder DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, BATCH = 2236, 8, 24
STEPS, FIRST, EVERY = 60, 4, 20
MIB = 1 << 20


@dataclasses.dataclass
class Training:
    """A plain training, and its state as a checkpoint holds it."""

    net: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls) -> Training:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        return cls(net, torch.optim.Adam(net.parameters(), lr=1e-4))

    def step(self, batch: torch.Tensor) -> None:
        self.net(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = self.optimizer.state_dict()["state"]
        inner = {f"{key}.{name}": t for key, part in moments.items() for name, t in part.items()}
        return {**self.net.state_dict(), **inner}


class Way:
    """A way to save; the base does nothing."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder

    def save(self, number: int) -> None:
        """Save; returns when the training may go on."""

    def finish(self) -> None:
        """Return when everything is saved."""


class Copy(Way):
    """A copy into ready buffers: the least that a save which does not wait can take."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        parameters = list(training.net.parameters())
        self.buffers = [torch.zeros_like(p) for p in parameters for _ in range(3)]

    def save(self, number: int) -> None:
        large = [t for t in self.training.tensors().values() if t.ndim]
        for buffer, tensor in zip(
            *(sorted(s, key=torch.numel) for s in (self.buffers, large)), strict=True
        ):
            buffer.view(-1).copy_(tensor.view(-1))


class Raw(Way):
    """Write, fsync and hash as many bytes: the least that a durable save can take."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.size = 3 * sum(p.nbytes for p in training.net.parameters())

    def save(self, number: int) -> None:
        chunk = memoryview(bytes(self.size // 24))
        digest = hashlib.sha256()
        with (self.folder / f"raw-{number}").open("wb", buffering=0) as handle:
            for _ in range(24):
                handle.write(chunk)
                digest.update(chunk)
            os.fsync(handle.fileno())


class Ours(Way):
    """What ``Trainer.fit`` does at a safe point."""

    is_async = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from helios.checkpoint.checkpoint_writer import PlainWriter
        from helios.checkpoint.store import CheckpointStore, PendingCheckpoint, RunFolder, Sidecar

        options = CheckpointStore(is_async=self.is_async)
        run = RunFolder(folder / "run", options)

        def describe(payload: dict[str, Any]) -> PendingCheckpoint:
            number = payload["training_state"]["global_iteration"]
            path = run.path_of(f"run_epoch_1_iter_{number}")
            return PendingCheckpoint(path, payload, Sidecar("run", 1, 1, number))

        self.writer = PlainWriter(run, describe)

    def save(self, number: int) -> None:
        payload = {
            **dict.fromkeys(("schema", "version", "rng", "cursor"), 1),
            "training_state": {"global_epoch": 1, "global_iteration": number},
            "num_replicas": 1,
            "model": self.training.state(),
        }
        self.writer.save(payload)

    def finish(self) -> None:
        self.writer.finish(lambda newest: None)


class OursSync(Ours):
    """The same with ``CheckpointStore(is_async=False)``."""

    is_async = False


class TorchSave(Way):
    """``torch.save`` into a file: neither durable nor whole after a kill."""

    def save(self, number: int) -> None:
        torch.save(self.training.state(), self.folder / f"torch-{number}.pt")


class TorchSaveDurable(Way):
    """``torch.save``, fsync and rename."""

    def save(self, number: int) -> None:
        partial = self.folder / "partial"
        with partial.open("wb") as handle:
            torch.save(self.training.state(), handle)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(self.folder / f"torch-{number}.pt")


class SafeTensors(Way):
    """``safetensors.torch.save_file`` of the tensors alone."""

    def save(self, number: int) -> None:
        from safetensors.torch import save_file

        save_file(self.training.tensors(), self.folder / f"{number}.safetensors")


class AsyncSave(Way):
    """``torch.distributed.checkpoint.async_save``, as its tutorial has it."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        self.future: Any = None

    def save(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.finish()
        self.future = dcp.async_save(self.training.state(), checkpoint_id=self.folder / f"{number}")

    def finish(self) -> None:
        if self.future is not None:
            self.future.result()


WAYS: dict[str, type[Way]] = {
    "none": Way,
    "copy": Copy,
    "raw": Raw,
    "async": Ours,
    "sync": OursSync,
    "torch.save": TorchSave,
    "torch.save+fsync": TorchSaveDurable,
    "safetensors": SafeTensors,
    "async_save": AsyncSave,
}


def run_way(name: str, folder: Path) -> dict[str, Any]:
    """Train once with a way of saving; returns its figures."""
    training, batch = Training.make(), torch.randn(BATCH, WIDTH)
    way = WAYS[name](training, folder)
    training.step(batch)
    blocked: list[float] = []
    begin = time.perf_counter()
    for number in range(STEPS):
        training.step(batch)
        if number % EVERY == FIRST:
            since = time.perf_counter()
            way.save(number)
            blocked.append(time.perf_counter() - since)
    way.finish()
    total = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"blocked": blocked, "total": total, "peak": peak}


def run_load(folder: Path) -> dict[str, Any]:
    """Time loads of one checkpoint, in turn; returns medians."""
    from helios.checkpoint.loading import load
    from helios.storage.files import digest_file

    way = Ours(Training.make(), folder)
    way.training.step(torch.randn(BATCH, WIDTH))
    way.save(1)
    way.finish()
    path = folder / "run" / "run_epoch_1_iter_1.pth"
    digest = (path.with_suffix(".json")).read_text()
    ways: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(path, weights_only=True),
        "torch.load(mmap)": lambda: torch.load(path, weights_only=True, mmap=True),
        "digest": lambda: digest_file(path) in digest,
        "Helios": lambda: load(path, maps=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, act in ways.items():
            since = time.perf_counter()
            act()
            times[name].append(time.perf_counter() - since)
    return {name: statistics.median(found) for name, found in times.items()}


def run_child(arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        command = [sys.executable, __file__, "--inside", folder, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        os.sync()
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    bare = statistics.median(run["total"] for run in found["none"])
    least = statistics.median(run["peak"] for run in found["none"])
    copy = statistics.median(
        s for run in found.get("copy", []) or [{"blocked": [float("nan")]}] for s in run["blocked"]
    )
    print(f"{'':>18} {'first':>8} {'blocked':>8} {'x copy':>8} {'lost':>8} {'memory':>8}")
    for name, runs in found.items():
        first = statistics.median([run["blocked"][0] for run in runs])
        later = statistics.median([s for run in runs for s in run["blocked"][1:]])
        saves = len(runs[0]["blocked"])
        lost = (statistics.median(run["total"] for run in runs) - bare) / saves
        memory = statistics.median(run["peak"] for run in runs) - least
        print(
            f"{name:>18} {first:>8.3f} {later:>8.3f} {later / copy:>8.2f} {lost:>8.3f}"
            f" {memory:>8.0f}"
        )
    print(f"a run that does not save: {bare:.2f} s, {least:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--folder", help="where to write; the folder of temporary files if absent")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        folder = Path(arguments.inside)
        print(json.dumps(run_way(arguments.way, folder) if arguments.way else run_load(folder)))
        return
    ways = list(dict.fromkeys(["none", *arguments.ways]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name in ways:
            found[name].append(run_child(arguments, "--way", name))
    with contextlib.suppress(BrokenPipeError):
        show(found)
        loads = run_child(arguments)
        print("loading:", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in loads.items()))


if __name__ == "__main__":
    main()

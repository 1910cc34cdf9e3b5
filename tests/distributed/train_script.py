"""A training script as users write it, for tests that start it in every way there is.

It prints one line of JSON at its end: what the process that ran it knows. Faults are planted by
options; where a training is killed, the kill happens once, marked by a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.distributed.collectives import get_global_rank
from helios.distributed.process_groups import is_dist_active
from helios.loops.optimizer import OptimizerLoop
from helios.plugins import CSVLogger, Plugin, Profiler
from helios.state import TrainingState
from tests.support.runs import digest


class Points(Dataset):
    """Samples with noise of their own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(5) * (index + 1.0)) + 0.1 * torch.rand(5)


class Module(helios.DataModule):
    """The data; one process of a machine prepares it."""

    unsaved = ("options",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    def prepare_data(self) -> None:
        options = self.options
        if options.fault == "prepare":
            raise ConnectionError("the data is not there")
        if options.prepared is not None:
            with options.prepared.open("a") as file:
                file.write(f"{os.getpid()}\n")

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        workers = dataclasses.replace(params, num_workers=1)
        waits = self.options.fault == "wait"
        self._train_dataset = self._create_dataset(Points(), workers if waits else params)
        self._valid_dataset = self._create_dataset(Points(), params)
        self._test_dataset = self._create_dataset(Points(), params)
        self._predict_dataset = self._create_dataset(Points(), params)
        # No other process could be given this.
        self.odd = lambda index: index


class Net(helios.Model):
    """Dropout and BatchNorm; its state is elastic."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.net.append(nn.Linear(8, 1))
        self.odd = lambda index: index
        if not fast_init:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        ids, features = batch
        loss = (self.net(features) - ids.float().unsqueeze(1) / 10).square().mean()
        self._loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, features = batch
        return {"score": (self.net(features).abs().sum(), len(ids))}

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return self.valid_step(batch, step)

    def predict_step(self, batch: Any, step: int) -> list[int]:
        return batch[0].tolist()


class Faults(Plugin):
    """Reports from the ranks, and does to them what a test asks for."""

    unsaved = ("options",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("faults")
        self.options = options

    def setup(self) -> None:
        queue = self.trainer.queue
        if queue is not None and is_dist_active():
            kinds = [type(self.trainer).__name__, type(find_loop(self.trainer)).__name__]
            queue.put(("rank", self.trainer.rank, torch.get_num_threads(), *kinds))
        self._write_pid(os.getpid())

    def _write_pid(self, pid: int | None) -> None:
        if self.options.pids is not None:
            with self.options.pids.open("a") as file:
                file.write(f"{pid}\n")

    def on_backward_start(self, loss: torch.Tensor) -> None:
        iteration = self.context.state.global_iteration
        if iteration == 5:
            self._fail()

    def _fail(self) -> None:
        options = self.options
        if self.trainer.rank != options.rank:
            return
        if options.fault in ("error", "listed"):
            raise LookupError("of one rank")
        if options.fault == "wait":
            (worker,) = multiprocessing.active_children()
            self._write_pid(worker.pid)
            signal.pause()
        if options.fault == "kill" and not options.marker.exists():
            options.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class OwnTrainer(helios.Trainer):
    """Goes to every rank as what it is."""


class OwnLoop(OptimizerLoop):
    """So does a loop that was connected."""


def find_loop(trainer: helios.Trainer) -> Any:
    """Return the loop that trains on a batch."""
    loop: Any = trainer.fit_loop
    return loop.epoch_loop.batch_loop.optimizer_loop


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--marker", type=Path)
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--reads", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> dict[str, Any]:
    """Train, and return what the process knows afterwards."""
    options = parse(arguments)
    folder = options.folder
    writers: list[Plugin] = []
    if folder is not None:
        # Whoever writes does so into a file of its own.
        writers.append(CSVLogger(folder / f"rows_{get_global_rank()}.csv"))
    if options.profile:
        writers.append(Profiler(folder / f"traces_{get_global_rank()}"))
    trainer = OwnTrainer(
        run_name=options.name,
        train_unit="iteration",
        total_steps=options.steps,
        valid_frequency=4,
        chkpt_frequency=None if folder is None or options.reads else 2,
        print_frequency=1,
        chkpt_root=folder,
        log_path=folder,
        enable_file_logging=folder is not None,
        enable_tensorboard=options.profile,
        run_path=folder,
        random_seed=3,
        use_cpu=True,
        nproc=options.nproc,
        max_restarts=options.restarts,
        num_replicas=options.replicas,
        plugins=[Faults(options), *writers],
    )
    loop: Any = trainer.fit_loop
    loop.epoch_loop.batch_loop.connect(optimizer_loop=OwnLoop())
    if options.fault == "listed":
        trainer.train_exceptions.append(LookupError)
    model, data = Net("net"), Module(options)
    found: dict[str, Any] = {"fit": trainer.fit(model, data), "exit_code": trainer.exit_code}
    found |= {
        "place": _place_of(trainer, model, data, *trainer.plugins.values()),
        "weights": digest(dict(model.net.state_dict())),
        "metrics": repr(model.metrics),
        "is_distributed": model.is_distributed,
        "items": _items(trainer),
    }
    if options.evaluate:
        found["test"] = [trainer.test(model, data), repr(model.test_scores)]
        found["valid"] = [trainer.validate(model, data), repr(model.metrics)]
        found["predictions"] = trainer.predict(model, data)
    return found


def _place_of(*owners: Any) -> list[int]:
    """Return the global and the local rank, which all owners must agree on."""
    ((global_rank, local_rank),) = {(owner.global_rank, owner.local_rank) for owner in owners}
    return [global_rank, local_rank]


def _items(trainer: helios.Trainer) -> list[Any]:
    if trainer.queue is None:
        return []
    return sorted(trainer.queue.get() for _ in range(trainer.queue.qsize()))


if __name__ == "__main__":
    text = json.dumps(main(sys.argv[1:]))
    # In one piece: processes of torchrun share the standard output.
    os.write(1, f"{text}\n".encode())

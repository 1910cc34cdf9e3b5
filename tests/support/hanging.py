"""A training that hangs where it is told to, in forks of the test."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # so that no fork takes its time for it
from torch.utils.data import Dataset, get_worker_info

import helios
from helios import CheckpointStore, DataLoaderParams
from helios.start import hangs
from tests.support.kills import all_gone

SECONDS = 150
"""How long a start may take at most."""
_FORK = multiprocessing.get_context("fork")


def wait_in_user_code(model: Net) -> None:
    """Hang, and let other threads run."""
    threading.Event().wait()


def be_stopped(model: Net) -> None:
    """Stop the process; what it leaves there says who it is."""
    (model.folder / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_with_lock_of_log(model: Net) -> None:
    """Hang with the locks of all handlers, so that nothing can be logged."""
    for name in (None, "helios"):
        for handler in logging.getLogger(name).handlers:
            handler.acquire()
    wait_in_user_code(model)


def wait_for_late_rank(model: Net) -> None:
    """Hang for longer than the first warning, and go on."""
    time.sleep(2.5)


def end_softly(model: Net) -> None:
    """Hang after a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    wait_in_user_code(model)


ACTS = {
    act.__name__: act
    for act in (
        *(wait_in_user_code, be_stopped, hang_with_lock_of_log),
        *(wait_for_late_rank, end_softly),
    )
}


class Samples(Dataset[Any]):
    """Some numbers; one of them never comes from a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            (self.folder / f"worker-{os.getpid()}").touch()
            if index == 30:
                threading.Event().wait()
        return torch.tensor([float(index)])


class Data(helios.DataModule):
    def __init__(self, folder: Path, num_workers: int) -> None:
        super().__init__()
        self.folder, self.num_workers = folder, num_workers

    def setup(self) -> None:
        params = DataLoaderParams(batch_size=2, num_workers=self.num_workers)
        self._train_dataset = self._create_dataset(Samples(self.folder), params)


class Net(helios.Model):
    """Does something in the second step of one rank."""

    unsaved = ("act",)

    def __init__(self, folder: Path, act: str, late: int) -> None:
        super().__init__("net")
        self.folder, self.act, self.late = folder, act, late

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        if state.global_iteration == 2 and self.trainer.rank == self.late and self.act:
            act, self.act = self.act, ""
            ACTS[act](self)
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss


def train(
    folder: Path,
    act: str = "",
    *,
    late: int = 0,
    num_workers: int = 0,
    timeout: float | None = 2.0,
    grace: float = 20.0,
) -> helios.Trainer:
    """Train for eight steps, as far as it comes."""
    hangs.WARNING_SECONDS = 0.9
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=8,
        chkpt_root=folder,
        chkpt_frequency=1,
        store=CheckpointStore(is_async=False),
        use_cpu=True,
        print_banner=False,
        hang_timeout=timeout,
        signals=helios.Signals(grace=grace, on_interrupt="return"),
        num_replicas=6,
    )
    trainer.fit(Net(folder, act, late), Data(folder, num_workers))
    return trainer


def run_forked(folder: Path, count: int = 1, **options: Any) -> tuple[list[int | None], list[str]]:
    """Train in forks of this process; returns their exit codes, and what they have said."""
    with socket.create_server(("127.0.0.1", 0)) as ear:
        port = ear.getsockname()[1]
    logs = [folder / f"log-{rank}" for rank in range(count)]
    ranks = [
        _FORK.Process(target=_serve, args=(rank, count, port, logs[rank], folder), kwargs=options)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + SECONDS
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        wait([rank.sentinel for rank in ranks if rank.is_alive()], 1.0)
        rest = [rank for rank in ranks if rank.is_alive()]
        stopped = folder / "stopped"
        if len(rest) == 1 and stopped.exists() and str(rest[0].pid) == stopped.read_text():
            # As its launcher does.
            rest[0].kill()
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks], [log.read_text() for log in logs]


def _serve(rank: int, count: int, port: int, log: Path, folder: Path, **options: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if count > 1:
        # As a task of srun.
        own = {"PROCID": rank, "LOCALID": rank, "STEP_ID": 0, "JOB_ID": 7, "STEP_NUM_TASKS": count}
        os.environ |= {f"SLURM_{name}": str(value) for name, value in own.items()}
        os.environ["MASTER_PORT"] = str(port)
    code = train(folder, **options).exit_code
    sys.stderr.flush()
    os._exit(code)


def survives(pid: int) -> bool:
    return not all_gone([pid])


def list_workers(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("worker-*")]

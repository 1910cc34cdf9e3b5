"""A training that hangs where it is told to: in forks of the test, and as a script."""

from __future__ import annotations

import argparse
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
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info

import helios
from helios import CheckpointStore, DataLoaderParams

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


def hold_lock_of_log(model: Net) -> None:
    """Hang with the locks of all handlers, so that nothing can be logged."""
    for name in (None, "helios"):
        for handler in logging.getLogger(name).handlers:
            handler.acquire()
    end_softly(model)


def hang_with_lock_of_log(model: Net) -> None:
    """Hang with the locks of all handlers, without a signal."""
    for name in (None, "helios"):
        for handler in logging.getLogger(name).handlers:
            handler.acquire()
    wait_in_user_code(model)


def evaluate_alone(model: Net) -> None:
    """Be busy longer than a run may stand still, and make progress all the time."""
    for _ in range(40):
        time.sleep(0.1)
        model.trainer._session.num_evaluated += 1


def compile_alone(model: Net) -> None:
    """Be busy with what looks like a compilation, and then for a moment with something else."""
    source = "import time\ndef compile_it():\n    time.sleep(4.0)\n"
    scope: dict[str, Any] = {"__name__": "torch._inductor.codegen"}
    exec(compile(source, torch.__file__, "exec"), scope)
    scope["compile_it"]()
    time.sleep(1.0)


def stand_for_a_while(model: Net) -> None:
    """Stand still once for longer than a run may, and go on while its stacks are written."""
    mark = model.folder / "stood"
    if not mark.exists():
        mark.touch()
        time.sleep(3.0)


def end_softly(model: Net) -> None:
    """Hang after a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    wait_in_user_code(model)


def end_all_softly(model: Net) -> None:
    """Hang after a SIGTERM to all ranks, which are children of one process."""
    for path in model.folder.glob("rank-*"):
        os.kill(int(path.name.partition("-")[2]), signal.SIGTERM)
    wait_in_user_code(model)


def fail(model: Net) -> None:
    """Raise an error."""
    raise LookupError("on purpose")


ACTS = {
    act.__name__: act
    for act in (
        *(wait_in_user_code, be_stopped, hold_lock_of_log, hang_with_lock_of_log),
        *(evaluate_alone, compile_alone, stand_for_a_while),
        *(end_softly, end_all_softly, fail),
    )
}


class Samples(Dataset[Any]):
    """Some numbers; one of them never comes from a worker, if it is named."""

    def __init__(self, folder: Path, never: int | None) -> None:
        self.folder, self.never = folder, never

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            (self.folder / f"worker-{os.getpid()}").touch()
            if index == self.never:
                self.read_from_stopped_disk()
        return torch.tensor([float(index)])

    def read_from_stopped_disk(self) -> None:
        threading.Event().wait()


class Data(helios.DataModule):
    def __init__(self, folder: Path, num_workers: int, method: str | None) -> None:
        super().__init__()
        self.folder, self.num_workers, self.method = folder, num_workers, method

    def setup(self) -> None:
        params = DataLoaderParams(
            batch_size=2, num_workers=self.num_workers, multiprocessing_context=self.method
        )
        samples = Samples(self.folder, 30 if self.num_workers else None)
        self._train_dataset = self._create_dataset(samples, params)


class Net(helios.Model):
    """Does something in one step of one rank.

    Args:
        folder: where it leaves what the test looks for.
        act: the name of what it does.
        at: in which iteration.
        late: on which rank.
    """

    def __init__(self, folder: Path, act: str, at: int, late: int) -> None:
        super().__init__("net")
        self.folder, self.act, self.at, self.late = folder, act, at, late

    def setup(self, fast_init: bool = False) -> None:
        (self.folder / f"rank-{os.getpid()}").touch()
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        if state.global_iteration == self.at and self.trainer.rank == self.late and self.act:
            ACTS[self.act](self)
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss


def train(
    folder: Path,
    act: str = "",
    *,
    at: int = 2,
    late: int = 0,
    frequency: int | None = 3,
    num_workers: int = 0,
    method: str | None = None,
    timeout: float | None = 2.0,
    warning: float | None = 0.9,
    grace: float = 20.0,
    is_async: bool = True,
    **options: Any,
) -> helios.Trainer:
    """Train for eight steps, as far as it comes.

    Args:
        folder: for checkpoints, if there are any, and for what is looked for.
        act: what is done; empty for nothing.
        at: in which iteration.
        late: on which rank.
        frequency: iterations between checkpoints; ``None`` for none.
        num_workers: loader workers; with some of them, a sample never comes.
        method: how these start.
        timeout: ``hang_timeout``.
        warning: ``hang_warning``.
        grace: seconds from a signal to an end without a save.
        is_async: whether a thread writes checkpoints.
        **options: further arguments of the trainer.
    """
    saves: dict[str, Any] = {} if frequency is None else {"chkpt_root": folder}
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=8,
        chkpt_frequency=frequency,
        store=None if frequency is None else CheckpointStore(is_async=is_async),
        use_cpu=True,
        print_banner=False,
        hang_warning=warning,
        hang_timeout=timeout,
        signals=helios.Signals(grace=grace, on_interrupt="return"),
        num_replicas=6,
        **saves,
        **options,
    )
    trainer.fit(Net(folder, act, at, late), Data(folder, num_workers, method))
    return trainer


def run_forked(folder: Path, count: int = 1, **options: Any) -> tuple[list[int | None], list[str]]:
    """Train in forks of this process; returns their exit codes, and what they have said.

    Args:
        folder: as for :func:`train`.
        count: the number of ranks; rank 0 has the store of several.
        **options: as for :func:`train`.
    """
    folder.mkdir(exist_ok=True)
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
        if len(rest) == 1 and count > 1 and str(rest[0].pid) == _read(folder / "stopped"):
            # As its launcher does.
            rest[0].kill()
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks], [log.read_text() for log in logs]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _serve(rank: int, count: int, port: int, log: Path, folder: Path, **options: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if count > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    code = train(folder, **options).exit_code
    sys.stderr.flush()
    os._exit(code)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def survives(pid: int) -> bool:
    """Whether a process goes on; one that was killed may need a moment on a busy machine."""
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_running(pid)


def list_workers(folder: Path) -> list[int]:
    """Return the ids of the loader workers that have read something."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("worker-*")]


def main() -> None:
    """Train by the command line, as :func:`train` does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--act", default="")
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--timeout", type=float)
    given = parser.parse_args()
    trainer = train(
        given.folder,
        given.act,
        late=given.late,
        nproc=given.nproc,
        timeout=given.timeout,
        warning=2.0,
    )
    raise SystemExit(trainer.exit_code)


if __name__ == "__main__":
    main()

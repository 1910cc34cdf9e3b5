"""Starts of a training that can be killed: forks of this process, or the command line."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from helios.distributed.collectives import TORCHRUN_VARIABLES

SECONDS = 150
"""How long a start may take, and what is left of it after a kill."""

_LAUNCHER_SECONDS = 1.0

_FORK = multiprocessing.get_context("fork")


class Start(ABC):
    """A start of a training, in one process or several."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether none of its processes has ended."""

    @abstractmethod
    def kill(self, random_: random.Random, *, have_met: bool) -> None:
        """Kill one of its processes, or all at once, as a power cut would.

        Args:
            random_: draws what is killed.
            have_met: whether its processes are connected, so that each notices the end of another.
        """

    @abstractmethod
    def wait(self) -> list[int | None]:
        """Return the exit codes, when all is gone; ``None`` for what did not end by itself."""

    @abstractmethod
    def close(self) -> None:
        """Kill what still runs, after an interruption of the wait."""


class Forked(Start):
    """Forks of this process, which has imported everything.

    Args:
        work: the training.
        count: in how many processes.
        folder: for the logs, and the file in which several processes meet.
    """

    def __init__(self, work: Callable[[], None], count: int, folder: Path) -> None:
        meeting = folder / f"meeting-{time.monotonic_ns()}"
        self._ranks = [
            _FORK.Process(target=_serve, args=(work, rank, count, folder, meeting))
            for rank in range(count)
        ]
        for rank in self._ranks:
            rank.start()

    @property
    def is_running(self) -> bool:
        return all(rank.is_alive() for rank in self._ranks)

    def kill(self, random_: random.Random, *, have_met: bool) -> None:
        is_one = random_.random() < 0.5
        for rank in [random_.choice(self._ranks)] if is_one else self._ranks:
            rank.kill()
        if not have_met:
            self._end_as_launcher(random_.uniform(0.0, _LAUNCHER_SECONDS))

    def _end_as_launcher(self, seconds: float) -> None:
        """End what goes on: for a rank that dies while a group forms gloo waits many minutes."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            rank.kill()

    def wait(self) -> list[int | None]:
        deadline = time.monotonic() + SECONDS
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self._ranks]
        for rank in self._ranks:
            rank.kill()
            rank.join()
            rank.close()
        return codes

    def close(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ValueError):  # it was closed by the wait
                rank.kill()


def _serve(work: Callable[[], None], rank: int, count: int, folder: Path, meeting: Path) -> None:
    with (folder / f"log-{rank}").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if count > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(meeting), count),
            rank=rank,
            world_size=count,
        )
    work()
    if count > 1:
        dist.barrier()
    # Destructors of a group may wait for ranks that are gone.
    os._exit(0)


class Cold(Start):
    """A command line, which may start further processes.

    Args:
        command: what is run.
        folder: for its log.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        own = {name: text for name, text in os.environ.items() if name not in TORCHRUN_VARIABLES}
        with (folder / "log-0").open("a") as log:
            self._process = subprocess.Popen(
                command,
                env=own | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self, random_: random.Random, *, have_met: bool) -> None:
        pid = self._process.pid
        if random_.random() < 0.3:
            os.killpg(pid, signal.SIGKILL)
            return
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for t in tasks for child in (t / "children").read_text().split()]
        with contextlib.suppress(ProcessLookupError):
            os.kill(random_.choice([pid, *children]), signal.SIGKILL)

    def wait(self) -> list[int | None]:
        deadline = time.monotonic() + SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS)
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return [self._process.returncode]
            time.sleep(0.01)
        self.close()
        return [None]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

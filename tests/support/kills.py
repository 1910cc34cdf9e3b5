"""Real kills: a training in a child process that sends itself SIGKILL at a named point."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from tests.support.quiet import Quiet
from tests.support.runs import Outcome, Setting, train


def kill_self() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillAt(Quiet):
    """Kills the process in a named event, at an iteration."""

    def __init__(self, event: str, iteration: int) -> None:
        super().__init__("kill-at")
        self.iteration = iteration
        self.now = 0
        setattr(self, event, self._act)

    def on_training_step_start(self, state: TrainingState) -> None:
        self.now = state.global_iteration

    def _act(self, *args: Any) -> None:
        if self.now >= self.iteration:
            kill_self()


class KillAtFileOperation:
    """Wraps every file operation of a save; kills before or after the n-th of them."""

    def __init__(self, number: int, *, is_after: bool) -> None:
        self.number = number
        self.is_after = is_after
        self.count = 0

    def install(self) -> None:
        for name in ("create", "fsync", "replace", "unlink", "fsync_folder", "make_folder"):
            setattr(files, name, self._wrap(getattr(files, name)))

    def _wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            is_hit = self.count == self.number
            if is_hit and not self.is_after:
                kill_self()
            result = operation(*args, **kwargs)
            if is_hit:
                kill_self()
            return result

        return wrapped


def run_in_child(work: Callable[[], Any], result: Path) -> int:
    """Run work in a forked child; returns its exit code, the outcome lies in ``result``."""

    def target() -> None:
        outcome = work()
        result.write_bytes(pickle.dumps(outcome))

    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    assert code is not None
    return code


def train_in_child(folder: Path, setting: Setting, *plugins: Plugin) -> int:
    return run_in_child(lambda: train(folder, setting, *plugins), folder.with_suffix(".outcome"))


def outcome_of(folder: Path) -> Outcome:
    """Return what the child that came to its end has left."""
    outcome: Outcome = pickle.loads(folder.with_suffix(".outcome").read_bytes())
    return outcome


def all_gone(pids: list[int]) -> bool:
    """Whether processes have ended; on a busy machine one that was killed needs a moment."""
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(map(is_gone, pids))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; without an init that collects them, orphans stay as zombies."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

"""Real signals at named moments, and the script that gets them in every way to start."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import helios
from helios.distributed.collectives import TORCHRUN_VARIABLES
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.elastic import Bits, Elastic, read_bits, train
from tests.support.started import started

_ROOTS = (Path(helios.__file__ or "").parents[1], Path(__file__).parents[2])


class SignalAt(Plugin):
    """Sends signals in a named event, once the training has come to an iteration.

    Args:
        rank: the process that sends; ``None``: each.
        to: ``"self"``, or ``"parent"`` for the process that has started this one.
        marker: a file that says that it was done; without one it is done once in a process.
    """

    unsaved = ("now", "has_sent")

    def __init__(
        self,
        event: str,
        iteration: int = 0,
        numbers: tuple[int, ...] = (signal.SIGTERM,),
        *,
        rank: int | None = None,
        to: str = "self",
        delay: float = 0.0,
        marker: Path | None = None,
        does_stick: bool = False,
    ) -> None:
        super().__init__("signal-at")
        self.event = event
        self.iteration = iteration
        self.numbers = numbers
        self.sender = rank
        self.to = to
        self.delay = delay
        self.marker = marker
        self.does_stick = does_stick
        self.now = 0
        self.has_sent = False
        if event != "setup":
            setattr(self, event, self._act)

    def setup(self) -> None:
        self.now, self.has_sent = 0, False
        if self.event == "setup":
            self._act()

    def on_training_batch_start(self, state: TrainingState) -> None:
        self.now = state.global_iteration

    def _act(self, *args: Any) -> None:
        if self.event == "on_training_batch_start":
            self.now = args[0].global_iteration
        is_it = self.sender in (None, self.trainer.rank)
        if not is_it or self.now < self.iteration or self.has_sent:
            return
        if self.marker is not None:
            mine = self.marker.with_suffix(f".{self.trainer.rank}")
            if mine.exists():
                return
            mine.touch()
        self.has_sent = True
        if self.delay:
            threading.Timer(self.delay, self._send).start()
        else:
            self._send()
        if self.does_stick:
            stick()

    def _send(self) -> None:
        for number in self.numbers:
            os.kill(os.getpid() if self.to == "self" else os.getppid(), number)


def stick() -> NoReturn:
    """Wait in C for ever, where no handler of Python runs, and let other threads run."""
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    raise AssertionError("a mutex was locked twice")


def run_forked(work: Any) -> int:
    """Run work in a forked child; returns the exit code, which the work returns."""

    def target() -> None:
        raise SystemExit(work())

    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    try:
        child.join()
        code = child.exitcode
    finally:
        child.kill()
        child.join()
        child.close()
    assert code is not None
    return code


def command(*arguments: Any, torchrun: int = 0) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    line = [*(launcher if torchrun else []), str(Path(__file__)), *map(str, arguments)]
    return [sys.executable, *line]


def environment(**changed: str) -> dict[str, str]:
    """Return the variables of a script that is started by hand."""
    own = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    roots = os.pathsep.join(map(str, _ROOTS))
    return own | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "1"} | changed


def start(*arguments: Any, torchrun: int = 0, **variables: str) -> tuple[int, str]:
    """Run the script to its end; returns its exit code and its log."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    line, env = command(*arguments, torchrun=torchrun), environment(**variables)
    with started(line, env=env, **pipes) as process:
        _, log = process.communicate(timeout=300)
        return process.returncode, log


def codes(folder: Path) -> list[int]:
    """Return with which codes processes have ended that came back from fit, and forget them."""
    found = sorted(folder.glob("code-*"))
    values = [int(path.read_text()) for path in found]
    for path in found:
        path.unlink()
    return values


def newest(folder: Path) -> tuple[int, int]:
    path = helios.find_last_checkpoint(folder / "elastic")
    if path is None:
        return 0, 0
    state = helios.load_checkpoint(path)["training_state"]
    return state.global_epoch, state.global_iteration


def train_alone(folder: Path, setting: Elastic, *plugins: Plugin, **more: Any) -> int:

    def work() -> int:
        trainer, _ = train(folder, setting, *plugins, nproc=1, **more)
        return trainer.exit_code

    return run_forked(work)


def undisturbed(folder: Path, setting: Elastic) -> Bits:
    assert train_alone(folder, setting) == 0
    return read_bits(folder)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unit", default="iteration")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--frequency", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=3, help="0: those of the run")
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--grace", type=float, default=60.0)
    parser.add_argument("--at", help="the name of an event")
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument("--send", type=int, nargs="+", default=[int(signal.SIGTERM)])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--to", default="self")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--stick", action="store_true")
    return parser.parse_args(arguments)


def setting_of(options: argparse.Namespace) -> Elastic:
    return Elastic(
        num_replicas=options.replicas or None,
        accumulation=options.accumulation,
        unit=options.unit,
        total_steps=options.steps,
        chkpt_frequency=options.frequency,
        num_workers=options.workers,
    )


def main() -> None:
    """Train; the signals are sent at the first start only."""
    options = parse(sys.argv[1:])
    plugins = []
    if options.at is not None:
        plugins.append(
            SignalAt(
                options.at,
                options.iteration,
                tuple(options.send),
                rank=options.rank,
                to=options.to,
                delay=options.delay,
                marker=options.folder / "sent",
                does_stick=options.stick,
            )
        )
    signals = helios.Signals(grace=options.grace)
    code = 0
    how = {"nproc": options.nproc, "max_restarts": options.restarts, "signals": signals}
    try:
        train(options.folder, setting_of(options), *plugins, **how)
    except helios.Interrupted as error:
        code = error.code
        raise
    finally:
        (options.folder / f"code-{os.getpid()}").write_text(str(code))


if __name__ == "__main__":
    main()

"""Kill trainings at random moments, start each again by the same call, and compare all bits.

A run saves at every step and deletes what is older than its newest two checkpoints. It is killed by
SIGKILL, started again, killed again, until it comes to its end; then losses and sample ids of all
iterations, weights, optimizer and generators must be those of an undisturbed run. A seed draws the
moments: at any time, soon after a start, or aimed at what a save leaves for an instant. Each
start is a fork of this process, which has imported everything; ``--cold`` starts them by the
command line. Of several processes one is killed, or all are. The others of a run under way must end
by themselves; before its first turn they are ended soon, as a launcher does.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (found by the line above)
import torch.distributed as dist  # noqa: E402

import helios  # noqa: E402
from helios.distributed.collectives import TORCHRUN_VARIABLES  # noqa: E402
from tests.support.elastic import Bits, Elastic, assert_same, read_bits, train  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

NUM_REPLICAS = 3
SECONDS = 150
"""How long a start may take, and what is left of it after a kill."""

_LAUNCHER_SECONDS = 1.0
_FORK = multiprocessing.get_context("fork")
AIMS = {
    "a payload": "*.pth.tmp",
    "a sidecar": "*.json.tmp",
    "a commit": "*.pth",
    "the last commit": "*_iter_{steps}.pth",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is tried.

    Attributes:
        kills: how many.
        seed: draws the moments.
        processes: that carry a run.
        is_async: whether a thread writes.
        steps: length of a run.
        is_cold: whether the command line starts them.
        verbose: whether each kill is told.
    """

    kills: int
    seed: int = 1
    processes: int = 1
    is_async: bool = True
    steps: int = 24
    is_cold: bool = False
    verbose: bool = False


@dataclasses.dataclass
class Report:
    """What has happened.

    Attributes:
        kills: processes, or groups of them, that were killed while they ran.
        resumes: starts after a kill that went on from the newest checkpoint, or began anew where
            there was none.
        places: where the kills have hit.
        runs: that came to their end.
        faults: what is not as it must be.
    """

    kills: int = 0
    resumes: int = 0
    runs: int = 0
    places: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)


def setting_of(options: Options, num_workers: int) -> Elastic:
    """Return the training."""
    store = helios.CheckpointStore(is_async=options.is_async, keep_last=2)
    return Elastic(
        num_replicas=NUM_REPLICAS,
        total_steps=options.steps,
        num_workers=num_workers,
        options={"store": store},
    )


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: some seconds after the start, or after something has come into the folder."""

    delay: float
    aim: str = ""

    def wait(self, folder: Path, start: Start, steps: int) -> None:
        """Return at the moment, or when there is nothing to kill any more."""
        if self.aim:
            pattern = AIMS[self.aim].format(steps=steps)
            before = set(folder.glob(f"elastic/{pattern}"))
            while start.is_running and not set(folder.glob(f"elastic/{pattern}")) - before:
                time.sleep(0.0005)
        end = time.monotonic() + self.delay
        while start.is_running and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.002))

    def __str__(self) -> str:
        return f"{1000 * self.delay:6.1f} ms behind {self.aim or 'the start'}"


def draw(random_: random.Random, duration: float) -> Moment:
    """Draw a moment of a run that takes so many seconds undisturbed."""
    kind = random_.random()
    if kind < 0.4:
        return Moment(random_.uniform(0.0, duration))
    if kind < 0.6:
        # A start and a resume are over soon.
        return Moment(random_.uniform(0.0, 0.1 * duration))
    return Moment(random_.choice((0.0, random_.uniform(0.0, 0.03))), random_.choice(list(AIMS)))


def committed(folder: Path) -> int:
    """Return the iteration of the newest checkpoint; 0 without one."""
    path = helios.find_last_checkpoint(folder / "elastic")
    return 0 if path is None else int(path.stem.split("_iter_")[1])


def count_lines(folder: Path) -> int:
    path = folder / "turns-0.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def first_iteration(folder: Path, since: int) -> int | None:
    """Return the iteration with which a start began; ``None`` if it did not come so far."""
    lines = (folder / "turns-0.jsonl").read_text().splitlines() if count_lines(folder) else []
    return int(lines[since].split('"iteration": ')[1].split(",")[0]) if lines[since:] else None


def find_place(folder: Path, options: Options, lines: int) -> str:
    """Say where a kill has hit, by what it has left."""
    place = folder / "elastic"
    present = list(place.glob("*.pth"))
    if list(place.glob("*.pth.tmp")):
        return "a payload in flight"
    if list(place.glob("*.json.tmp")):
        return "a sidecar in flight"
    if any(not path.with_suffix(".pth").exists() for path in place.glob("*.json")):
        return "between two files of a save or of a deletion"
    if len(present) > 3:
        return "between a commit and the deletion of an old one"
    if not present:
        return "before the first save"
    if count_lines(folder) == lines:
        return "in start-up or resume"
    if committed(folder) == options.steps:
        return "behind the last checkpoint"
    return "in training, no save in flight"


class Trial:
    """Kills runs until there were enough kills.

    Args:
        options: what is tried.
        folder: for the runs.
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.report = Report()
        self._random = random.Random(f"{options.seed} {options.processes} {options.is_async}")

    def run(self) -> Report:
        """Try everything; returns what has happened."""
        expected, duration = self._train_undisturbed()
        while self.report.kills < self.options.kills and not self.report.faults:
            self._run_once(expected, duration)
        return self.report

    def _make_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    def _begin(self, folder: Path, num_workers: int) -> Start:
        options = self.options
        if not options.is_cold:
            setting = setting_of(options, num_workers)
            return Forked(lambda: train(folder, setting), options.processes, folder)
        line = [sys.executable, __file__, "--train", str(folder), "--workers", str(num_workers)]
        line += ["--steps", str(options.steps), "--processes", str(options.processes)]
        return Cold([*line, *([] if options.is_async else ["--sync"])], folder)

    def _train_undisturbed(self) -> tuple[Bits, float]:
        """Train in this process, which imports what a training needs, and as the trial does."""
        folder = self._make_folder("undisturbed")
        trainer, _ = train(folder, setting_of(self.options, 0))
        if trainer.exit_code:
            # A signal for this script has reached its own training.
            raise KeyboardInterrupt
        again, begin = self._make_folder("again"), time.monotonic()
        with closing(self._begin(again, 0)) as start:
            codes = start.wait()
        assert set(codes) == {0}, (again / "log-0").read_text()
        assert_same(read_bits(again), read_bits(folder))
        return read_bits(folder), time.monotonic() - begin

    def _run_once(self, expected: Bits, duration: float) -> None:
        """Start one run again and again until its end, and compare."""
        folder = self._make_folder(f"run-{self.report.runs}")
        num_workers = self._random.choice((0, 0, 0, 2))
        is_over = False
        while not is_over and not self.report.faults:
            has_enough = self.report.kills >= self.options.kills
            moment = None if has_enough else draw(self._random, duration)
            is_over = self._start_once(folder, num_workers, moment)
        self.report.runs += 1
        if self.report.faults:
            return
        try:
            assert_same(read_bits(folder), expected)
        except AssertionError as error:
            self._blame(folder, f"not the same bits: {error}")

    def _start_once(self, folder: Path, num_workers: int, moment: Moment | None) -> bool:
        """Start once, perhaps kill; returns whether the run came to its end."""
        newest, lines = committed(folder), count_lines(folder)
        is_hit = False
        with closing(self._begin(folder, num_workers)) as start:
            if moment is not None:
                moment.wait(folder, start, self.options.steps)
                is_hit = start.is_running
                if is_hit:
                    start.kill(self._random, have_met=count_lines(folder) > lines)
            codes = start.wait()
        first = first_iteration(folder, lines)
        if first not in (None, newest + 1):
            self._blame(folder, f"a start went on with {first}, and the newest was {newest}")
        if None in codes:
            self._blame(folder, f"processes did not end within {SECONDS} s: {codes}")
        if set(codes) == {0}:
            self.report.resumes += newest > 0 or lines > 0
            return True
        self._note_kill(folder, codes, lines, moment, is_hit=is_hit)
        return False

    def _note_kill(
        self,
        folder: Path,
        codes: list[int | None],
        lines: int,
        moment: Moment | None,
        *,
        is_hit: bool,
    ) -> None:
        is_killed = -signal.SIGKILL in codes or (self.options.is_cold and is_hit)
        if not is_hit or not is_killed:
            self._blame(folder, f"a start that was not killed ended with {codes}")
            return
        place = find_place(folder, self.options, lines)
        self.report.kills += 1
        self.report.places[place] += 1
        self.report.resumes += lines > 0
        if self.options.verbose:
            print(f"{self.report.kills:4} {folder.name:8} {moment}: {place}, {codes}", flush=True)

    def _blame(self, folder: Path, text: str) -> None:
        logs = [path.read_text()[-3000:] for path in sorted(folder.glob("log-*"))]
        self.report.faults.append("\n".join([f"{folder}: {text}", *logs]))


def show(options: Options, report: Report, seconds: float) -> None:
    """Print what has happened."""
    mode = "async" if options.is_async else "sync"
    way = "by the command line" if options.is_cold else "forked"
    print(
        f"{report.kills} of {options.kills} kills, seed {options.seed}, {options.processes} "
        f"process(es) {way}, {mode}: {report.runs} runs of {options.steps} steps came to their "
        f"end with equal bits, {report.resumes} starts went on; {seconds:.0f} s"
    )
    for place, count in report.places.most_common():
        print(f"{count:5} {place}")
    for fault in report.faults:
        print(f"FAULT {fault}")


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--sync", action="store_true", help="no thread writes")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--cold", action="store_true", help="start by the command line")
    parser.add_argument("--folder", type=Path, help="where to train; a temporary one by default")
    parser.add_argument("--verbose", action="store_true", help="tell of each kill")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = parse()
    torch.set_num_threads(1)
    # The logs of this process's own training would hide the report.
    logging.disable(logging.INFO)
    options = Options(
        kills=given.kills,
        seed=given.seed,
        processes=given.processes,
        is_async=not given.sync,
        steps=given.steps,
        is_cold=given.cold,
        verbose=given.verbose,
    )
    if given.train is not None:
        setting = setting_of(options, given.workers)
        train(given.train, setting, nproc=options.processes)
        return 0
    interrupt_at_signals()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report = Trial(options, Path(folder)).run()
    show(options, report, time.monotonic() - begin)
    return 1 if report.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

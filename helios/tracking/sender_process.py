"""The process that sends what a tracker stores: how training starts it, and what it does.

It follows the stored points until it is stopped. It reads how training has ended from its standard
input, and reports to its standard output. If the training is killed, its input ends, and it exits:
what is not sent is sent by the next start. What the server has acknowledged is noted in the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import helios.version
from helios.best import BestValidation
from helios.errors import FolderInUseError, LedgerError, UsageError
from helios.ledger.run_facts import RunFacts, read_run
from helios.storage.folder_lock import FolderLock
from helios.tracking.targets import Delivery, Destination, MLflow, Rows, from_plain
from helios.tracking.tracker_folder import SEALED, TrackedRun, TrackerFolder

_LOGGER = logging.getLogger(__name__)
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from helios.tracking.sender_process import main; sys.exit(main(sys.argv[1]))"
)
_MOST_CHARACTERS = 500
_EVERY, _LONGEST, _SOON = 2.0, 60.0, 0.2
_LINE = 64
_NICENESS = 10
FINISHED = "finished"
"""The outcome of a training that came to its end."""


def start_sender(folder: TrackerFolder) -> SenderProcess | None:
    """Start a process that sends the points of a folder; ``None``, and a warning, without one."""
    try:
        return SenderProcess(folder)
    except OSError as error:
        _LOGGER.warning(
            "The process that sends the points of the tracker %s could not be started: %s. They "
            "are kept. Send them with: helios send %s",
            folder.path,
            error,
            folder.path,
        )
        return None


class SenderProcess:
    """A process that sends the points of a folder while training goes on.

    Args:
        folder: the folder of the tracker.
    """

    def __init__(self, folder: TrackerFolder) -> None:
        self._folder = folder
        # The package may be found by a path that another process does not have.
        root = Path(helios.version.__file__).parent.parent
        # Loader workers are forked by this same thread, so they have only those ends of the pipes
        # that the training keeps: neither process waits for an end that such a worker holds.
        with folder.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(folder.path), str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C is for the training, which then says how it has ended.
                start_new_session=True,
            )
        self._reader = threading.Thread(
            target=self._listen, args=(self._process.stdout,), daemon=True, name="helios-tracker"
        )
        self._reader.start()

    def _listen(self, reports: IO[bytes]) -> None:
        for line in reports:
            text = line.decode("utf-8", "replace").strip()
            _LOGGER.warning(
                "The tracker %s cannot send its points: %s. They are kept and sent later; training "
                "does not depend on it. See %s there.",
                self._folder.path,
                text[:_MOST_CHARACTERS].rstrip("."),
                self._folder.log.name,
            )
            # The warning is given once a start; the rest is in the log of the process.
            break
        for _ in reports:
            continue

    def finish(self, outcome: str, patience: float) -> None:
        """Wait until all points are sent, or could not be.

        Args:
            outcome: how the training has ended: finished, failed or killed.
            patience: the longest time to wait, in seconds.
        """
        with contextlib.suppress(OSError):
            self._write(outcome)
        try:
            has_sent = self._process.wait(patience) == 0
        except subprocess.TimeoutExpired:
            has_sent = False
        self.stop()
        if not has_sent:
            _LOGGER.warning(
                "Not all points of the tracker %s were sent. They are kept. Send them with: "
                "helios send %s",
                self._folder.path,
                self._folder.path,
            )

    def _write(self, outcome: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{outcome}\n".encode())
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the process at once; what was not sent is kept."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def main(path: str) -> int:
    """Follow a folder as a process of its own; returns its exit code.

    What libraries print goes to standard error.
    """
    if sys.platform != "win32":
        os.nice(_NICENESS)
    # Standard input is of use for what a library starts, and that must not read the orders.
    source = os.dup(0)
    reports: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def report(text: str) -> None:
        reports.write(text.replace("\n", " ").encode() + b"\n")

    code = send_until_end(TrackerFolder(Path(path)), source, report)
    if code:
        # At a regular exit, a library would end a run that is not at its end.
        os._exit(code)
    return code


def send_until_end(folder: TrackerFolder, source: int, report: Callable[[str], None]) -> int:
    """Send points as they are stored, until the training has ended and all are sent.

    Args:
        folder: the folder of the tracker.
        source: descriptor of a pipe: a line with the outcome; its end ends the process.
        report: gets why points could not be sent, once until they are.

    Returns:
        0 if everything was sent.
    """
    orders = _Orders(source)
    lock = FolderLock(folder.path)
    while not _is_acquired(lock):
        # The sender of a start that was killed is still there.
        time.sleep(_SOON)
    sender: Sender | None = None
    pause, has_failed = _EVERY, False
    training = os.getppid()
    # A loader worker of a killed training may still hold its end of the pipe.
    while os.getppid() == training:
        outcome = orders.outcome
        try:
            sender = sender or _make_sender(folder)
            sender.flush(is_finished=outcome == FINISHED)
            pause, has_failed = _EVERY, False
            if outcome:
                sender.finish(outcome)
                return 0
        except SupersededError:
            return 1
        except Exception as error:
            traceback.print_exc()
            if not has_failed or outcome:
                report(f"{type(error).__name__}: {error}")
            if outcome:
                return 1
            pause, has_failed = min(2 * pause, _LONGEST), True
        orders.wait(pause)
    return 1


def _is_acquired(lock: FolderLock) -> bool:
    try:
        lock.acquire()
    except FolderInUseError:
        return False
    return True


def _make_sender(folder: TrackerFolder) -> Sender:
    run = folder.read_run()
    if run is None:
        raise UsageError(f"There is no tracker.json in {folder.path}. Put it back.")
    return Sender(folder, run, connect(folder, run))


class _Orders:
    """What the training writes to this process: how it has ended."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._has_ended = threading.Event()
        self.outcome = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # Not through sys.stdin: the interpreter cannot exit while a thread reads from it.
        text = b""
        while part := os.read(self._source, _LINE):
            text += part
            if text.endswith(b"\n"):
                self.outcome = text.decode().strip()
                self._has_ended.set()
        # The training was killed, or waits no longer. Nothing is lost, so nothing is tidied up.
        os._exit(1)

    def wait(self, seconds: float) -> None:
        self._has_ended.wait(seconds)


def send(path: Path) -> tuple[int, str]:
    """Send once what is stored in a folder.

    Args:
        path: the folder of a tracker.

    Returns:
        How many rows were sent, and where to.

    Raises:
        UsageError: if there is no tracker, or its training is running.
        Exception: if the server cannot be reached, or refuses something.
    """
    folder = TrackerFolder(path)
    run = folder.read_run()
    if run is None:
        raise UsageError(f"There is no tracker in {path}. Pass the folder of Tracker(folder=...).")
    try:
        with FolderLock(path):
            destination = connect(folder, run)
            sender = Sender(folder, run, destination)
            sender.flush(is_finished=run.outcome == FINISHED)
            sender.finish(run.outcome or "killed")
    except FolderInUseError as error:
        raise UsageError(
            f"What {path} contains is being sent by a training that runs. Wait for its end."
        ) from error
    return sender.num_sent, destination.place


def connect(folder: TrackerFolder, run: TrackedRun) -> Destination:
    """Return the destination of a run, whose library is imported here.

    Raises:
        ImportError: if the library is not installed.
    """
    target = from_plain(run.target)
    if isinstance(target, MLflow):
        from helios.tracking.mlflow_run import MLflowRun

        return MLflowRun(folder, run, target)
    if target.delivery is Delivery.CONTINUED:
        from helios.tracking.wandb_run import WandBOnlineRun

        return WandBOnlineRun(folder, run, target)
    from helios.tracking.wandb_run import WandBRun

    return WandBRun(folder, run, target)


_TOPICS = ("params", "given", "definition", "options")


class SupersededError(Exception):
    """The stored points belong to another run now, which another sender sends."""


class Sender:
    """Sends the points of a run, each until the server has acknowledged it.

    Args:
        folder: the folder of the tracker.
        run: which run they belong to.
        destination: the run of the server.
    """

    def __init__(self, folder: TrackerFolder, run: TrackedRun, destination: Destination) -> None:
        self._num_sent: dict[str, int] = {}
        self._folder = folder
        self._run = run
        self._destination = destination
        self._progress = folder.read_progress(run.key)
        sent = self._progress.sent
        if destination.delivery is not Delivery.ACKNOWLEDGED:
            self._progress.sent, self._progress.documents = {}, {}
        if destination.delivery is Delivery.CONTINUED:
            self._progress.sent[SEALED] = sent.get(SEALED, 0)
        self._is_open = False
        self._has_params = False

    @property
    def num_sent(self) -> int:
        """How many rows were acknowledged since this sender was made."""
        return max(self._num_sent.values(), default=0)

    def flush(self, *, is_finished: bool = False) -> None:
        """Send all rows that are stored, and the options; a failure can be repeated.

        Args:
            is_finished: whether training is finished, so that its last iteration is complete.

        Raises:
            SupersededError: if the points belong to another run now.
            Exception: if the server cannot be reached, or refuses something.
        """
        if not self._is_open:
            facts = self._read_facts()
            self._destination.open(self._run.params | _list_options(facts))
            self._is_open = True
            self._has_params = facts is not None
        for name, send in self._destination.channels().items():
            self._drain(name, send, is_finished=is_finished)
        self._destination.confirm()
        facts = None if self._has_params else self._read_facts()
        if facts is not None:
            self._destination.add_params(_list_options(facts))
            self._has_params = True

    def _drain(self, name: str, send: Callable[[Rows], int], *, is_finished: bool) -> None:
        progress = self._progress
        while True:
            rows, end = self._read(progress.sent.get(name, 0), is_finished)
            if not rows:
                return
            self._check_key()
            self._num_sent[name] = self._num_sent.get(name, 0) + send(rows)
            progress.sent[name] = end
            self._folder.write_progress(progress)

    def _read(self, start: int, is_finished: bool) -> tuple[Rows, int]:
        if self._destination.delivery is not Delivery.CONTINUED:
            return self._folder.read_points(start)
        rows, end = self._folder.read_iterations(start, with_last=is_finished)
        if rows and is_finished and end > self._progress.sent[SEALED]:
            # Before it is sent: a longer training must know that nothing can be added to it.
            self._progress.sent[SEALED] = end
            self._folder.write_progress(self._progress)
        return rows, end

    def _check_key(self) -> None:
        """Check, once rows are read, that they belong to this run: its key is changed first."""
        run = self._folder.read_run()
        if run is None or run.key != self._run.key:
            raise SupersededError

    def _read_facts(self) -> RunFacts | None:
        """Return what is known of the run, once its newest start is written."""
        if not self._run.run_folder:
            return None
        try:
            found = read_run(Path(self._run.run_folder))
        except LedgerError:
            return None
        return found if found.newest.get("time", "") >= self._run.since else None

    def finish(self, outcome: str) -> None:
        """Send the summary with the best validation, and how the run has ended."""
        summary, best = summarize(self._iterate()), self._find_best()
        if best is not None:
            summary["best"] = best.as_plain()
        self._destination.finish(outcome, summary)

    def _find_best(self) -> BestValidation | None:
        """Return the best validation, as the run's folder says; ``None`` if it does not."""
        facts = self._read_facts()
        return None if facts is None else facts.best

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        position = 0
        while True:
            rows, position = self._folder.read_points(position)
            if not rows:
                return
            yield from rows


def _list_options(facts: RunFacts | None) -> dict[str, Any]:
    """Return the options of the newest start."""
    settings = {} if facts is None else facts.settings
    return {
        f"{topic}.{name}": value if isinstance(value, str | int | float) else json.dumps(value)
        for topic in _TOPICS
        for name, value in settings.get(topic, {}).items()
    }


def summarize(rows: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last place of a run, and the last, least and greatest value of each name.

    NaN is neither the least nor the greatest; where all values are NaN, these are left out.
    """
    numbers: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"epoch": 0, "iteration": 0, "numbers": numbers}
    for row in rows:
        found["epoch"], found["iteration"] = row["epoch"], row["iteration"]
        for name, value in row.get("values", {}).items():
            entry = numbers.setdefault(name, {"count": 0})
            entry["count"] += 1
            entry["last"] = value
            if not math.isnan(float(value)):
                entry["min"] = min(entry.get("min", value), value, key=float)
                entry["max"] = max(entry.get("max", value), value, key=float)
    return found

"""The process that sends what a tracker stores: how training starts it, and what it does.

It follows the stored points until it is stopped. It reads how training has ended from its standard
input, and reports to its standard output. If the training is killed, its input ends, and it exits:
what is not sent is sent by the next start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

import helios.version
from helios.errors import FolderInUseError, UsageError
from helios.storage.folder_lock import FolderLock
from helios.tracking.sender import Sender, SupersededError
from helios.tracking.targets import Delivery, Destination, MLflow, from_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder

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
        from helios.tracking.wandb_online import WandBOnlineRun

        return WandBOnlineRun(folder, run, target)
    from helios.tracking.wandb_run import WandBRun

    return WandBRun(folder, run, target)

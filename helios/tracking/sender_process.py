"""Starts the process that sends what a tracker stores, and reports what it cannot send."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import helios.version
from helios.tracking.tracker_folder import TrackerFolder

_LOGGER = logging.getLogger(__name__)
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from helios.tracking.following import main; sys.exit(main(sys.argv[1]))"
)
_MOST_CHARACTERS = 500


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

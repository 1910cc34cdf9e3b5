"""The lineage of a run: what happened to it, one line per event, in the order of time.

It holds the time and the host, so lineages of equal runs differ; they are never compared. Like the
times of a run, it is a file of JSON lines, which may fail without stopping the training.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, final

from helios.errors import LedgerError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@final
class AppendOnlyLog:
    """Appends lines to a file; several threads may do so.

    A failure is logged once, and stops nothing.

    Args:
        path: the file; a missing folder is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._has_failed = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line of plain values."""
        text = ""
        try:
            text = json.dumps(line, ensure_ascii=False)
            with self._lock:
                # A name that is no text becomes an escape of JSON.
                self._append(f"{text}\n".encode("utf-8", "backslashreplace"))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if not self._has_failed:
                self._has_failed = True
                _LOGGER.warning(
                    "%s could not be written: %s. The line %s is missing in it; the training does "
                    "not depend on it.",
                    self._path,
                    error,
                    text,
                )

    def _append(self, data: bytes) -> None:
        if not self._path.parent.exists():
            files.make_folder(self._path.parent)
        with self._path.open("ab+", buffering=0) as handle:
            if handle.tell():
                handle.seek(-1, 2)
                # A kill may have cut the last line off.
                data = data if handle.read(1) == b"\n" else b"\n" + data
            files.write(handle, data)


def read_event_file(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, the oldest first; nothing if there is none.

    A line that a kill has cut off is left out.

    Args:
        path: the file.
        keys: what every line must have.

    Raises:
        LedgerError: if the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error}.") from error
    for line in lines:
        try:
            found = json.loads(line)
            for key in keys:
                found[key]
        except (ValueError, LookupError, TypeError):
            continue
        yield found


FILE_NAME = "run.jsonl"

START, RESUME, BRANCH = "start", "resume", "branch"
CHANGE, FALLBACK, MIGRATION, LOST_LEDGER = "change", "fallback", "migration", "lost ledger"
SAVE, FAILED_SAVE = "save", "failed save"
INTERRUPTION, ERROR, END = "interruption", "error", "end"
STARTS = (START, RESUME, BRANCH)
"""The events with which a process begins to train."""


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


@final
class RunFile:
    """Appends events to the lineage of a run; several threads may do so.

    A failure is logged once, and stops nothing.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = AppendOnlyLog(folder / FILE_NAME)

    def add(self, event: str, **details: Any) -> None:
        """Append an event.

        Args:
            event: one of the names above.
            details: plain values; ``None`` is left out.
        """
        given = {name: value for name, value in details.items() if value is not None}
        self._file.append({"time": now(), "event": event, **given})


def read_run_file(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, the oldest first; nothing if there is no lineage.

    A line that a kill has cut off is left out.

    Raises:
        LedgerError: if the file cannot be read.
    """
    yield from read_event_file(folder / FILE_NAME, "time", "event")

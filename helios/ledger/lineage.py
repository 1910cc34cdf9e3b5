"""The lineage of a run: what happened to it, one line per event, in the order of time.

It holds the time and the host, so lineages of equal runs differ; they are never compared.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, final

from helios.errors import LedgerError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)
FILE_NAME = "lineage.jsonl"

START, RESUME, BRANCH = "start", "resume", "branch"
CHANGE, FALLBACK, MIGRATION, LOST_LEDGER = "change", "fallback", "migration", "lost ledger"
SAVE, FAILED_SAVE = "save", "failed save"
REWIND = "rewind"
INTERRUPTION, ERROR, END = "interruption", "error", "end"
STARTS = (START, RESUME, BRANCH)
"""The events with which a process begins to train."""


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


@final
class Lineage:
    """Appends events to the lineage of a run; several threads may do so.

    A failure is logged once, and stops nothing.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        self._has_failed = False

    def add(self, event: str, **details: Any) -> None:
        """Append an event.

        Args:
            event: one of the names above.
            details: plain values; ``None`` is left out.
        """
        given = {name: value for name, value in details.items() if value is not None}
        line = json.dumps({"time": now(), "event": event, **given}, ensure_ascii=False)
        try:
            with self._lock:
                self._append(f"{line}\n".encode())
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _LOGGER.warning(
                    "The event %r could not be written to %s: %s. The training does not depend on "
                    "it.",
                    event,
                    self._path,
                    error,
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


def read_lineage(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, the oldest first; nothing if there is no lineage.

    A line that a kill has cut off is left out.

    Raises:
        LedgerError: if the file cannot be read.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise LedgerError(f"The lineage {path} cannot be read: {error}.") from error
    for line in lines:
        try:
            event = json.loads(line)
            event["time"], event["event"]
        except (ValueError, LookupError, TypeError):
            continue
        yield event

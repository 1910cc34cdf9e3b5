"""The lineage of a run: what happened to it, one line per event, in the order of time.

It holds the time and the host, so lineages of equal runs differ; they are never compared.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from helios.ledger.event_file import EventFile, now, read_event_file

FILE_NAME = "lineage.jsonl"

START, RESUME, BRANCH = "start", "resume", "branch"
CHANGE, FALLBACK, MIGRATION, LOST_LEDGER = "change", "fallback", "migration", "lost ledger"
SAVE, FAILED_SAVE = "save", "failed save"
REWIND, MISMATCH = "rewind", "mismatch"
INTERRUPTION, ERROR, END = "interruption", "error", "end"
STARTS = (START, RESUME, BRANCH)
"""The events with which a process begins to train."""


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
        self._file = EventFile(folder / FILE_NAME)

    def add(self, event: str, **details: Any) -> None:
        """Append an event.

        Args:
            event: one of the names above.
            details: plain values; ``None`` is left out.
        """
        given = {name: value for name, value in details.items() if value is not None}
        self._file.append({"time": now(), "event": event, **given})


def read_lineage(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, the oldest first; nothing if there is no lineage.

    A line that a kill has cut off is left out.

    Raises:
        LedgerError: if the file cannot be read.
    """
    yield from read_event_file(folder / FILE_NAME, "time", "event")

"""The folder of a tracker: what its files are called, and how they are read.

``points.jsonl`` has a row for everything that was logged, ``pictures`` the files that rows name.
``tracker.json`` says which run on which server they belong to, and ``sent.json`` how far the server
has acknowledged them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helios.errors import UsageError
from helios.storage import files

SEALED = "sealed"
"""In ``sent.json``, where a run gets whole iterations: how many bytes it has of complete ones."""

_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TrackedRun:
    """Which run of a server the points belong to.

    Attributes:
        key: identifies the run on the server; random, so that no two runs share it.
        name: the name of the run.
        target: where it is sent to, as plain values.
        params: the hyper-parameters.
        created: when the run began, in milliseconds since 1970.
        run_folder: the folder with the run's file of events; empty without one.
        since: when the newest start began, in UTC; an older start is not of this run.
        outcome: how the newest start ended: finished, failed or killed; empty while it trains.
        cut: the size that ``points.jsonl`` is being truncated to; ``None`` at other times.
    """

    key: str
    name: str
    target: dict[str, Any]
    params: dict[str, Any]
    created: int
    run_folder: str = ""
    since: str = ""
    outcome: str = ""
    cut: int | None = None


@dataclass
class Progress:
    """What the server has acknowledged.

    Attributes:
        key: the run.
        sent: bytes of ``points.jsonl``, by channel, and ``SEALED``.
        documents: digests of other files, by name.
    """

    key: str
    sent: dict[str, int] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)


class TrackerFolder:
    """The folder of a tracker.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points = path / "points.jsonl"
        self.pictures = path / "pictures"
        self.log = path / "sender.log"
        self._run = path / "tracker.json"
        self._progress = path / "sent.json"

    def read_run(self) -> TrackedRun | None:
        """Return which run the points belong to; ``None`` if it is not known.

        Raises:
            UsageError: if the file is damaged, or of another version.
        """
        try:
            return TrackedRun(**json.loads(self._run.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self._run} is damaged or cannot be read ({error}). Rename the folder "
                f"{self.path}: the points in it are kept, and a new run begins on the server."
            ) from error

    def write_run(self, run: TrackedRun) -> None:
        """Write which run the points belong to."""
        self._write(self._run, asdict(run))

    def read_progress(self, key: str) -> Progress:
        """Return what the server has acknowledged of a run; nothing if the file is of no use.

        A point that is sent again is stored once, so a lost file costs time only.
        """
        try:
            found = Progress(**json.loads(self._progress.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return Progress(key)
        return found if found.key == key else Progress(key)

    def write_progress(self, progress: Progress) -> None:
        """Write what the server has acknowledged."""
        self._write(self._progress, asdict(progress))

    @staticmethod
    def _write(path: Path, content: Mapping[str, Any]) -> None:
        files.write_text_durably(path, json.dumps(content, indent=1) + "\n")

    def read_points(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """Return some complete rows from a position on, once they are on the disk.

        A row that a crash of the machine could take back would be repeated with another time, and
        the server would have it twice.

        Args:
            start: position in bytes.

        Returns:
            The rows, and the position after them.
        """
        lines, _ = self._read_lines(start, _READ_AT_ONCE)
        return [json.loads(line) for line in lines], start + sum(map(len, lines))

    def read_iterations(self, start: int, *, with_last: bool) -> tuple[list[dict[str, Any]], int]:
        """Return rows as :meth:`read_points` does, and all rows of an iteration together.

        Args:
            start: position in bytes.
            with_last: whether the last iteration is complete. If not, it is left out: it may get
                more rows.

        Returns:
            The rows, and the position after them.
        """
        size = _READ_AT_ONCE
        while True:
            lines, is_end = self._read_lines(start, size)
            rows = [json.loads(line) for line in lines]
            number = len(rows)
            if not (is_end and with_last):
                while number and rows[number - 1]["iteration"] == rows[-1]["iteration"]:
                    number -= 1
            if number or is_end:
                return rows[:number], start + sum(map(len, lines[:number]))
            size *= 2

    def _read_lines(self, start: int, size: int) -> tuple[list[bytes], bool]:
        """Return complete lines from a position on, and whether no other line follows."""
        try:
            with self.points.open("rb") as handle:
                files.fsync(handle)
                handle.seek(start)
                text = handle.read(size)
                is_end = len(text) < size
                text += b"" if is_end else handle.readline()
        except FileNotFoundError:
            return [], True
        return text[: text.rfind(b"\n") + 1].splitlines(keepends=True), is_end

    @property
    def size(self) -> int:
        """Bytes of ``points.jsonl``."""
        return self.points.stat().st_size if self.points.exists() else 0

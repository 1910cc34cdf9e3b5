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
        run_folder: the folder with the run's manifest; empty without one.
        since: when the newest start began, in UTC; an older manifest is not of this run.
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
        sent: bytes of ``points.jsonl``, by channel.
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
        try:
            with self.points.open("rb") as handle:
                files.fsync(handle)
                handle.seek(start)
                text = handle.read(_READ_AT_ONCE)
                if len(text) == _READ_AT_ONCE:
                    text += handle.readline()
        except FileNotFoundError:
            return [], start
        text = text[: text.rfind(b"\n") + 1]
        return [json.loads(line) for line in text.splitlines()], start + len(text)

    @property
    def size(self) -> int:
        """Bytes of ``points.jsonl``."""
        return self.points.stat().st_size if self.points.exists() else 0

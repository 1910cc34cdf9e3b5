"""``run.jsonl``: the settings and events of a run, written and read.

Each event is a line of JSON; docs/logging.md lists them. The file depends on time and place, so it
is never compared. A line that cannot be written causes a warning; one that a kill has truncated is
skipped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, final

from helios.best import BestValidation
from helios.errors import LedgerError
from helios.ledger import book
from helios.storage import files
from helios.storage.files import as_local_path
from helios.text import json_value

_LOGGER = logging.getLogger(__name__)
FILE_NAME = "run.jsonl"

START, VALIDATION = "start", "validation"
FALLBACK, MIGRATION, LOST_LEDGER = "fallback", "migration", "lost ledger"
SAVE, FAILED_SAVE = "save", "failed save"
INTERRUPTION, ERROR, END = "interruption", "error", "end"
FILE_NAMES = (book.FILE_NAME, FILE_NAME)
# The first one of several that have the same values under the same name is shown.
_SETTINGS = ("params", "given", "definition", "options", "helios", "machine", "git")
# Names of runs, and where their files are.
_HIDDEN = ("run_name", "chkpt_root", "run_path", "log_path", "src_root", "resume")


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


@final
class RunFile:
    """Appends events to the file of a run; several threads may do so.

    Args:
        folder: the run's folder; a missing one is created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        self._has_failed = False

    def add(self, event: str, **details: Any) -> None:
        """Append an event.

        Args:
            event: one of the names above.
            details: values of any type; ``None`` is left out.
        """
        try:
            known = {name: value for name, value in details.items() if value is not None}
            text = json.dumps(json_value({"time": now(), "event": event, **known}))
            with self._lock:
                self._append(f"{text}\n".encode())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if not self._has_failed:
                self._has_failed = True
                _LOGGER.warning(
                    "Could not write the event %r to %s: %s. Training continues without it.",
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


NOT_WRITTEN = "<not written>"
"""Stands for a secret."""
_SECRET = re.compile(
    r"(?<![a-z])(?:token|(?:access|api|auth|private)[_.-]?key|password|secret)(?![a-z])"
    r"|(?:^|\.|--)key$",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _is_secret(name: str) -> bool:
    return _SECRET.search(_HUMP.sub("_", name)) is not None


def without_secrets(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat table in which texts of secret names, such as ``api_key``, are replaced."""
    return {
        name: NOT_WRITTEN if _is_secret(name) and _has_text(value) else value
        for name, value in table.items()
    }


def without_nested_secrets(tree: Any, name: str = "") -> Any:
    """Return plain data in which texts of secret names are replaced, at any depth."""
    if tree and _is_secret(name) and _has_text(tree):
        return NOT_WRITTEN
    if isinstance(tree, dict):
        return {key: without_nested_secrets(each, f"{name}.{key}") for key, each in tree.items()}
    if isinstance(tree, list):
        return [without_nested_secrets(each, name) for each in tree]
    return tree


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(map(_has_text, value)))


def without_secret_words(words: Iterable[str]) -> list[str]:
    """Return words of a command line, in which values of secret names are replaced."""
    found: list[str] = []
    is_value = False
    for word in words:
        name, equal, _ = word.partition("=")
        is_name = _is_secret(name)
        if is_value and not word.startswith("-"):
            found.append(NOT_WRITTEN)
        else:
            found.append(f"{name}={NOT_WRITTEN}" if equal and is_name else word)
        is_value = is_name and not equal and word.startswith("-")
    return found


def read_run_file(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, the oldest first; nothing without a file.

    Raises:
        LedgerError: if the file cannot be read.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error}.") from error
    for line in lines:
        try:
            found = json.loads(line)
            found["time"], found["event"]
        except (ValueError, LookupError, TypeError):
            continue
        yield found


@dataclass
class RunStart:
    """A start of a run.

    Attributes:
        time, host: when and where; in UTC.
        processes: their number.
        iteration: the one that it continued from.
        changes: what has changed since the start before.
        end: how it ended.
    """

    time: str
    host: str
    processes: int
    iteration: int
    changes: list[str] = field(default_factory=list)
    end: str = ""


@dataclass
class RunFacts:
    """The facts of a run, except for the lines of its ledger.

    Attributes:
        folder: its folder.
        newest: the event of the newest start.
        starts: the oldest first.
        validations: the events of those with scores, each iteration once.
    """

    folder: Path
    newest: Mapping[str, Any] = field(default_factory=dict)
    starts: list[RunStart] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def missing(self) -> list[str]:
        """Names of files that are not there."""
        return [name for name in FILE_NAMES if not (self.folder / name).is_file()]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of the newest start: flat tables, by topic."""
        tables = {topic: self.newest[topic] for topic in _SETTINGS if topic in self.newest}
        return {
            topic: dict(_flatten(table)) if isinstance(table, Mapping) else {topic: table}
            for topic, table in tables.items()
        }

    @property
    def best(self) -> BestValidation | None:
        """The best validation, as the run has judged it; ``None`` if nothing decides."""
        newest = self.validations[-1:]
        return BestValidation.from_plain(newest[0].get("best")) if newest else None

    def find_last_scores(self) -> dict[str, float]:
        """Return the scores of the last validation that had them, by name."""
        return {name: x for line in self.validations for name, x in line["scores"].items()}

    def find_last_losses(self) -> dict[str, float]:
        """Return the losses of the last iteration, by name."""
        path = self.folder / book.FILE_NAME
        return book.read_last_losses(path) if path.is_file() else {}

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event."""
        kind = event["event"]
        if kind == START:
            self._add_start(event)
        elif kind == VALIDATION:
            scores = {name: float(score) for name, score in event["scores"].items()}
            self.validations.append(event | {"scores": scores})
        elif kind in (END, INTERRUPTION, ERROR) and self.starts:
            self.starts[-1].end = event["cause"] if kind == END else f"{kind}: {event['cause']}"

    def _add_start(self, event: dict[str, Any]) -> None:
        iteration = event["iteration"]
        if iteration == 0 and event["run"] != self.newest.get("run"):
            # Another run in the same folder.
            self.starts = []
        # What was done after the checkpoint is repeated.
        self.validations = [x for x in self.validations if x["iteration"] <= iteration]
        self.newest = event
        time, host, count = event["time"], event["host"], event["processes"]
        self.starts.append(RunStart(time, host, count, iteration, event.get("changes", [])))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables, with their whole names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_run(place: str | Path) -> Path:
    """Return the folder of a run.

    Args:
        place: the folder itself, a file that the run has recorded itself in, or a folder above a
            single run.

    Raises:
        LedgerError: if there is no such file, or more than one run.
    """
    return book.require_one(as_local_path("The run", place), find_runs(place))


def find_runs(place: str | Path) -> list[Path]:
    """Return the folders of all runs that :func:`find_run` would look at, at least one.

    Raises:
        LedgerError: if there is none.
    """
    path = as_local_path("The run", place)
    if path.is_file() and path.name in FILE_NAMES:
        return [path.parent]
    return book.find_folders(path, FILE_NAMES)


def read_run(folder: Path) -> RunFacts:
    """Return the facts in the events file of a run's folder; empty without one.

    Raises:
        LedgerError: if the file cannot be read.
    """
    found = RunFacts(folder)
    for event in read_run_file(folder):
        # A line that somebody has edited is left out.
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            found.add(event)
    for start in found.starts:
        start.end = start.end or ("no end so far" if start is found.starts[-1] else "killed")
    return found


def find_differences(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Return the settings that differ between newest starts: the value in each run, by name.

    ``None`` stands for no value. A value that several topics hold is in it once.
    """
    tables = [
        {
            (topic, name): value
            for topic, table in run.settings.items()
            for name, value in table.items()
            if name not in _HIDDEN
        }
        for run in runs
    ]
    found: dict[tuple[str, str], list[Any]] = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key) for table in tables]
        is_known = any(_end(key[1]) == _end(name) and values == x for (_, name), x in found.items())
        if any(value != values[0] for value in values) and not is_known:
            found[key] = values
    ends = [_end(name) for _, name in found]
    return {
        _end(name) if ends.count(_end(name)) == 1 else f"{topic}.{name}": values
        for (topic, name), values in found.items()
    }


def _end(name: str) -> str:
    return name.rpartition(".")[2]

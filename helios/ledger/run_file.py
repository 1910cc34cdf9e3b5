"""``run.jsonl``: what a run was started with, and what happened to it, a JSON line an event.

docs/logging.md lists the events. The file depends on time and place, so it is never compared. A
line that cannot be written costs a warning; one that a kill has cut off is skipped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, final

from helios.errors import LedgerError
from helios.protocols import Clock
from helios.storage import files

_LOGGER = logging.getLogger(__name__)
FILE_NAME = "run.jsonl"

START, STRETCH, VALIDATION = "start", "stretch", "validation"
FALLBACK, MIGRATION, LOST_LEDGER = "fallback", "migration", "lost ledger"
SAVE, FAILED_SAVE = "save", "failed save"
INTERRUPTION, ERROR, END = "interruption", "error", "end"
_SECONDS, _SHARE = 1.0, 100


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


@final
class RunFile:
    """Appends events to the file of a run; several threads may do so.

    A stretch of iterations takes at least a second and a 100th of the time since the start, so the
    file stays small.

    Args:
        folder: the run's folder; a missing one is created.
        clock: returns seconds.
    """

    def __init__(self, folder: Path, *, clock: Clock = time.perf_counter) -> None:
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        self._has_failed = False
        self._clock = clock
        self._begin = self._due = self._paused = 0.0
        # Iteration and time of the last stretch, and of the last iteration.
        self._written = self._newest = (0, 0.0)

    def add(self, event: str, **details: Any) -> None:
        """Append an event.

        Args:
            event: one of the names above.
            details: values of any type; ``None`` is left out.
        """
        try:
            known = {name: value for name, value in details.items() if value is not None}
            text = json.dumps(as_plain({"time": now(), "event": event, **known}))
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

    def begin(self, iteration: int) -> None:
        """Begin the first stretch.

        Args:
            iteration: the last one before it.
        """
        self._begin = self._clock()
        self._written = self._newest = (iteration, self._begin)
        self._due = self._begin + _SECONDS

    def note(self, iteration: int) -> None:
        """Note that an iteration has ended.

        Args:
            iteration: its number.
        """
        moment = self._clock()
        self._newest = (iteration, moment)
        if moment >= self._due:
            self._add_stretch()

    def end_pause(self) -> None:
        """Note that no iteration has used the time since the last one."""
        iteration, before = self._newest
        self._newest = (iteration, self._clock())
        self._paused += self._newest[1] - before

    def close(self) -> None:
        """Append the last stretch."""
        if self._newest != self._written:
            self._add_stretch()

    def _add_stretch(self) -> None:
        iteration, moment = self._newest
        before, begin = self._written
        paused = round(self._paused, 3) or None
        self._written, self._paused = self._newest, 0.0
        self._due = moment + max(_SECONDS, (moment - self._begin) / _SHARE)
        self.add(
            STRETCH,
            iteration=iteration,
            iterations=iteration - before,
            seconds=round(moment - begin, 3),
            paused=paused,
        )


def as_plain(value: Any) -> Any:
    """Return a value as JSON has it: other objects as their types."""
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        # JSON has neither infinities nor NaN.
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = (each.name for each in dataclasses.fields(value) if each.init)
        return as_plain({name: getattr(value, name) for name in own})
    if isinstance(value, Mapping):
        return {str(as_plain(key)): as_plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(as_plain, value)]
    return f"{type(value).__module__}.{type(value).__qualname__}"


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

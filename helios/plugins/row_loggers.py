"""Loggers that write logged numbers to a text file: CSV, or one JSON object per line.

Both receive ``on_log``, so they log what TensorBoard does. A resumed run truncates the file to the
state of its checkpoint, so the file is byte for byte that of an uninterrupted run. With several
processes, rank 0 writes.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from helios.counters import TrainingState
from helios.distributed.collectives import get_global_rank
from helios.errors import ArgumentError
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.storage.files import as_local_path
from helios.storage.row_file import RowFile
from helios.text import as_json

_LOGGER = logging.getLogger(__name__)
_COLUMNS = ("epoch", "iteration", "name", "value")


class RowLogger(Plugin):
    """Base of the loggers that write rows.

    The file is open from ``on_fit_start`` to ``teardown``. Numbers that ``validate``, ``test`` and
    ``predict`` log are not written.

    Args:
        path: the file.
        header: the first line of the file, with its line end; empty for none.
        plug_id: unique id of the plugin.
    """

    _internals: ClassVar[str] = "_early _file _is_writing _mark"

    def __init__(self, path: str | Path, header: str, plug_id: str) -> None:
        super().__init__(plug_id)
        place = as_local_path(f"{type(self).__name__}(path=...)", path)
        if place.is_dir():
            raise ArgumentError(f"{type(self).__name__} needs a file, got the folder {place}.")
        self._file = RowFile(place, header)
        self._mark: dict[str, Any] | None = None
        self._is_writing = False
        self._early: list[str] = []

    @property
    def path(self) -> Path:
        """Absolute path of the file."""
        return self._file.path

    @abstractmethod
    def format(self, scalars: Mapping[str, float], state: TrainingState) -> str:
        """Return the rows, with their line ends, for some numbers of an iteration."""

    def setup(self) -> None:
        """Discard the state of an earlier run; the file does not change yet."""
        self._mark = None
        self._early = []
        self._is_writing = get_global_rank() == 0

    def on_fit_start(self) -> None:
        """Open the file, truncated to the state of the checkpoint if there is one."""
        self._is_writing = self._is_writing and not self.context.is_replay
        if not self._is_writing:
            return
        self._file.restore(self._mark)
        for text in self._early:
            self._file.append(text)
        self._early = []

    @asks_nothing
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write the numbers."""
        if self._file.is_open:
            self._file.append(self.format(scalars, state))
        elif self._is_writing:
            # Logged before this plugin's on_fit_start: kept until the file is open.
            self._early.append(self.format(scalars, state))

    def on_training_end(self) -> None:
        """Warn if nothing was logged at all."""
        if self._is_writing and not self._file.has_rows:
            _LOGGER.warning(
                "%s is empty: nothing was logged. Pass print_frequency to the trainer, or log "
                "numbers with context.log().",
                self.path,
            )

    def teardown(self) -> None:
        """Close the file."""
        self._is_writing = False
        self._early = []
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file, once all its rows are on the disk."""
        return {"mark": self._file.mark() if self._file.is_open else self._mark}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the length of the file."""
        self._mark = state_dict["mark"]


@PLUGIN_REGISTRY.register
class CSVLogger(RowLogger):
    """Write every logged number as one row of a CSV file.

    The columns are ``epoch`` (from 1), ``iteration``, ``name`` and ``value``, so new names do not
    change existing rows. Values are Python's ``repr`` of a float, which reads back exactly, also
    ``nan`` and ``inf``.

    Args:
        path: the file. A relative path is resolved against the current working directory.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.

    Raises:
        ArgumentError: if the path is that of a folder.
    """

    def __init__(self, path: str | Path, plug_id: str = "csv-logger") -> None:
        super().__init__(path, ",".join(_COLUMNS) + "\n", plug_id)

    def format(self, scalars: Mapping[str, float], state: TrainingState) -> str:
        """Return a row for each number."""
        head = f"{state.global_epoch},{state.global_iteration}"
        return "".join(f"{head},{_quote(name)},{value!r}\n" for name, value in scalars.items())


def _quote(name: str) -> str:
    # Python's writer does not quote a lone carriage return, and its reader ends a row there.
    if not name.isprintable() or any(mark in name for mark in ',"'):
        return '"' + name.replace('"', '""') + '"'
    return name


@PLUGIN_REGISTRY.register
class JSONLLogger(RowLogger):
    """Write the numbers of each log call as one JSON object per line.

    The keys are ``epoch`` (from 1), ``iteration`` and the names. JSON has no ``nan`` and no
    infinity: they are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float``
    reads; every other value is a number that reads back exactly. Numbers with the name of one of
    the two keys are omitted.

    Args:
        path: the file. A relative path is resolved against the current working directory.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.

    Raises:
        ArgumentError: if the path is that of a folder.
    """

    def __init__(self, path: str | Path, plug_id: str = "jsonl-logger") -> None:
        super().__init__(path, "", plug_id)

    def format(self, scalars: Mapping[str, float], state: TrainingState) -> str:
        """Return one object."""
        head = {"epoch": state.global_epoch, "iteration": state.global_iteration}
        values = {name: as_json(value) for name, value in scalars.items()}
        return json.dumps(head | values | head, allow_nan=False) + "\n"

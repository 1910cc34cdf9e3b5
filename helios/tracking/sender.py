"""Sends what a tracker has stored, and notes what the server has acknowledged."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helios.best import BestValidation
from helios.errors import LedgerError
from helios.ledger.manifest import manifest_file
from helios.ledger.manifest.manifest_file import Manifest, read_manifest
from helios.ledger.run_facts import read_run
from helios.tracking.targets import Delivery, Destination, Rows
from helios.tracking.tracker_folder import SEALED, TrackedRun, TrackerFolder

_TOPICS = ("params", "found", "options", "seeds", "parameters")


class SupersededError(Exception):
    """The stored points belong to another run now, which another sender sends."""


class Sender:
    """Sends the points of a run, each until the server has acknowledged it.

    Args:
        folder: the folder of the tracker.
        run: which run they belong to.
        destination: the run of the server.
    """

    def __init__(self, folder: TrackerFolder, run: TrackedRun, destination: Destination) -> None:
        self._num_sent: dict[str, int] = {}
        self._folder = folder
        self._run = run
        self._destination = destination
        self._progress = folder.read_progress(run.key)
        sent = self._progress.sent
        if destination.delivery is not Delivery.ACKNOWLEDGED:
            self._progress.sent, self._progress.documents = {}, {}
        if destination.delivery is Delivery.CONTINUED:
            self._progress.sent[SEALED] = sent.get(SEALED, 0)
        self._is_open = False
        self._has_params = False
        self._manifest: Manifest | None = None
        self._stamp: tuple[int, int] | None = None

    @property
    def num_sent(self) -> int:
        """How many rows were acknowledged since this sender was made."""
        return max(self._num_sent.values(), default=0)

    def flush(self, *, is_finished: bool = False) -> None:
        """Send all rows that are stored, and the manifest; a failure can be repeated.

        Args:
            is_finished: whether training is finished, so that its last iteration is complete.

        Raises:
            SupersededError: if the points belong to another run now.
            Exception: if the server cannot be reached, or refuses something.
        """
        manifest = self._read_manifest()
        if not self._is_open:
            self._destination.open(self._run.params | _flatten(manifest))
            self._is_open = True
            self._has_params = manifest is not None
        for name, send in self._destination.channels().items():
            self._drain(name, send, is_finished=is_finished)
        self._destination.confirm()
        if manifest is not None:
            if not self._has_params:
                self._destination.add_params(_flatten(manifest))
                self._has_params = True
            self._add_document(Path(self._run.run_folder) / manifest_file.FILE_NAME)

    def _drain(self, name: str, send: Callable[[Rows], int], *, is_finished: bool) -> None:
        progress = self._progress
        while True:
            rows, end = self._read(progress.sent.get(name, 0), is_finished)
            if not rows:
                return
            self._check_key()
            self._num_sent[name] = self._num_sent.get(name, 0) + send(rows)
            progress.sent[name] = end
            self._folder.write_progress(progress)

    def _read(self, start: int, is_finished: bool) -> tuple[Rows, int]:
        if self._destination.delivery is not Delivery.CONTINUED:
            return self._folder.read_points(start)
        rows, end = self._folder.read_iterations(start, with_last=is_finished)
        if rows and is_finished and end > self._progress.sent[SEALED]:
            # Before it is sent: a longer training must know that nothing can be added to it.
            self._progress.sent[SEALED] = end
            self._folder.write_progress(self._progress)
        return rows, end

    def _check_key(self) -> None:
        """Check, once rows are read, that they belong to this run: its key is changed first."""
        run = self._folder.read_run()
        if run is None or run.key != self._run.key:
            raise SupersededError

    def _add_document(self, path: Path) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if self._progress.documents.get(path.name) != digest:
            self._destination.add_document(path)
            self._progress.documents[path.name] = digest
            self._folder.write_progress(self._progress)

    def _read_manifest(self) -> Manifest | None:
        """Return the manifest, once the newest start is in it."""
        folder = Path(self._run.run_folder)
        path = folder / manifest_file.FILE_NAME
        if not self._run.run_folder or not path.exists():
            return None
        stamp = (path.stat().st_mtime_ns, path.stat().st_size)
        if stamp != self._stamp:
            try:
                found = read_manifest(folder)
            except LedgerError:
                # The training has warned of it.
                return None
            self._stamp = stamp
            is_new = found is not None and found.sections[-1].start["time"] >= self._run.since
            self._manifest = found if is_new else None
        return self._manifest

    def finish(self, outcome: str) -> None:
        """Send the summary with the best validation, and how the run has ended."""
        summary, best = summarize(self._iterate()), self._find_best()
        if best is not None:
            summary["best"] = best.as_plain()
        self._destination.finish(outcome, summary)

    def _find_best(self) -> BestValidation | None:
        """Return the best validation, as the run's folder says; ``None`` if it does not."""
        if self._read_manifest() is None:
            return None
        try:
            return read_run(self._run.run_folder).find_best()
        except LedgerError:
            return None

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        position = 0
        while True:
            rows, position = self._folder.read_points(position)
            if not rows:
                return
            yield from rows


def _flatten(manifest: Manifest | None) -> dict[str, Any]:
    """Return the options of the first start, which resumes do not change."""
    if manifest is None:
        return {}
    found: dict[str, Any] = {}
    for topic in _TOPICS:
        _flatten_into(found, topic, manifest.sections[0].facts.get(topic, {}))
    return found


def _flatten_into(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            _flatten_into(found, f"{name}.{key}", each)
    elif not isinstance(value, Mapping):
        found[name] = value if isinstance(value, str | int | float) else json.dumps(value)


def summarize(rows: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last place of a run, and the last, least and greatest value of each name.

    NaN is neither the least nor the greatest; where all values are NaN, these are left out.
    """
    numbers: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"epoch": 0, "iteration": 0, "numbers": numbers}
    for row in rows:
        found["epoch"], found["iteration"] = row["epoch"], row["iteration"]
        for name, value in row.get("values", {}).items():
            entry = numbers.setdefault(name, {"count": 0})
            entry["count"] += 1
            entry["last"] = value
            if not math.isnan(float(value)):
                entry["min"] = min(entry.get("min", value), value, key=float)
                entry["max"] = max(entry.get("max", value), value, key=float)
    return found

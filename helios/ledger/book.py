"""The file of a ledger: written during a run, truncated at a resume, found and read by others."""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, final

from helios.errors import LedgerError
from helios.ledger import line
from helios.ledger.line import end_of, is_scores, read_float
from helios.storage import files
from helios.storage.files import as_local_path

_LOGGER = logging.getLogger(__name__)
FILE_NAME = "ledger.jsonl"
EVERY = 1_000
_MOST_LINES = 1_024
_BLOCK = 1 << 18


@final
class Book(line.LineReceiver):
    """Appends lines to the ledger of a run; closed until :meth:`open` is called.

    A failed write does not stop training: the lines stay in memory, and the next write tries again.
    Only a checkpoint needs them on the disk: see :meth:`sync`.

    Args:
        folder: the run's folder.
        run: hash of the run's definition.

    Attributes:
        every: the number of steps between two hashes of the weights, as at the first start.
        loss: why the ledger of a checkpoint could not be continued; ``None`` if it was.
    """

    def __init__(self, folder: Path, *, run: str) -> None:
        self.every = EVERY
        self.loss: str | None = None
        self._path = folder / FILE_NAME
        self._run = run
        self._is_open = False
        self._lock = threading.Lock()
        self._chain = ""
        # The hash that the last line has: that of the chain, or of scores beside it.
        self._tail = ""
        self._size = 0
        # Where the first line that waits belongs in the file, and all lines that wait.
        self._waiting: tuple[int, list[bytes]] = (0, [])
        self._handle: BinaryIO | None = None
        # The first line of a new ledger, until its file is created.
        self._head: bytes | None = None
        self._has_failed = False

    def open(self, mark: Mapping[str, Any] | None, *, after: int) -> None:
        """Begin a ledger, or continue the one of a checkpoint.

        A ledger of another run, or one that does not match the checkpoint, is renamed.

        Args:
            mark: the result of :meth:`mark` in the checkpoint; ``None`` if it has none.
            after: the last iteration before the first new line.
        """
        self.close()
        self.loss = None
        self._is_open, self._has_failed = True, False
        if mark is not None:
            self.every = mark["every"]
            if self._cut_back(mark):
                return
        head: dict[str, Any] = {"ledger": line.VERSION, "run": self._run, "every": self.every}
        head |= {"after": after}
        if mark is not None:
            head["lost"] = True
        data, self._chain = line.seal(line.write_body(head), "")
        self._head = data
        self._waiting = (0, [data])
        self._size, self._tail = len(data), self._chain

    def append(self, bodies: Iterable[str]) -> None:
        """Append lines, and write them.

        Args:
            bodies: JSON objects without their closing braces.
        """
        if self._is_open:
            chain, data = self._chain, []
            for body in bodies:
                sealed, chain = line.seal(body, chain)
                data.append(sealed)
            self._chain = chain
            self._add(data, chain)

    def append_scores(
        self, after: int, scores: Mapping[str, float], unscored: Collection[str]
    ) -> None:
        """Append the scores of a validation, beside the chain.

        Args:
            after: the last iteration, whose line was appended.
            scores: by name.
            unscored: names of those that are left out.
        """
        if self._is_open and scores:
            body = line.describe_scores(scores, unscored, after)
            data, tail = line.seal(body, self._chain)
            self._add([data], tail)

    def _add(self, data: Sequence[bytes], tail: str) -> None:
        self._size += sum(map(len, data))
        self._tail = tail
        with self._lock:
            self._waiting[1].extend(data)
        self._try_write()

    def mark(self) -> dict[str, Any]:
        """Return the size and hash of the ledger so far, for a checkpoint."""
        self._try_write()
        found = {"size": self._size, "hash": self._chain, "every": self.every}
        if self._tail != self._chain:
            found["tail"] = self._tail
        return found

    def sync(self) -> None:
        """Wait until all lines are on the disk; another thread may call this.

        Raises:
            OSError: if they cannot be written.
        """
        if not self._is_open:
            return
        try:
            with self._lock:
                self._write()
            # With a handle of its own, because the training appends lines meanwhile.
            with self._path.open("r+b", buffering=0) as handle:
                files.fsync(handle)
        except FileNotFoundError:
            self._is_open = False
            _LOGGER.warning(
                "The ledger %s was deleted while the run wrote it. The run continues without one, "
                "and begins a new one at its next start.",
                self._path,
            )

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        if self._is_open:
            self._try_write()
        self._is_open = False
        self._drop_handle()
        self._waiting, self._head = (0, []), None

    def _cut_back(self, mark: Mapping[str, Any]) -> bool:
        """Truncate the ledger to a mark; returns whether it matches."""
        size, chain = mark["size"], mark["hash"]
        own = mark.get("tail", chain)
        tail = end_of(own)
        try:
            with self._path.open("rb") as handle:
                handle.seek(size - len(tail))
                found = handle.read(len(tail))
            if found == tail:
                files.truncate(self._path, size)
        except OSError as error:
            self._warn(f"could not be read ({error})")
            return False
        if found != tail:
            self._warn("does not match the checkpoint: it was cut off, changed or replaced")
            return False
        self._chain, self._tail, self._size = chain, own, size
        self._waiting, self._head = (size, []), None
        return True

    def _warn(self, what: str) -> None:
        self.loss = what
        _LOGGER.warning(
            "The ledger %s %s. Training continues with a new ledger, which begins after the "
            "checkpoint, so `helios verify` will report missing lines. To keep them, stop the run "
            "and put the file back.",
            self._path,
            what,
        )

    def _try_write(self) -> None:
        try:
            with self._lock:
                self._write()
        except (OSError, MemoryError) as error:
            self._report(error)

    def _write(self) -> None:
        """Write the lines that wait; the caller holds the lock."""
        place, lines = self._waiting
        if not self._is_open or not lines:
            return
        data = b"".join(lines)
        try:
            handle = self._handle = self._handle or self._open_file()
            # After a failure, a part of the lines may already be in the file.
            handle.seek(place)
            files.write(handle, data)
        except BaseException:
            self._drop_handle()
            raise
        self._waiting = (place + len(data), [])
        self._has_failed = False

    def _open_file(self) -> BinaryIO:
        if self._head is None:
            return self._path.open("r+b", buffering=0)
        self._move_aside(self._head)
        handle = files.create(self._path)
        self._head = None
        return handle

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                handle.close()

    def _move_aside(self, head: bytes) -> None:
        """Rename a ledger of another run or another start; the same start writes it again."""
        if not self._path.exists():
            return
        with self._path.open("rb") as handle:
            if head.startswith(handle.read(len(head))):
                return
        target = files.rename_aside(self._path)
        _LOGGER.warning(
            "The ledger %s is of an earlier start, and was renamed to %s.", self._path, target.name
        )

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _LOGGER.error(
                "Could not write the ledger %s: %s. Training continues and tries again; no "
                "checkpoint is saved until the ledger is on the disk. Free disk space, or check "
                "the disk.",
                self._path,
                error,
            )


def find_ledger(place: str | Path) -> Path:
    """Return the ledger of a run.

    Args:
        place: the ledger itself, the folder that holds it, or a folder above a single run.

    Raises:
        LedgerError: if there is none, or more than one run.
    """
    path = as_local_path("The run", place)
    if path.is_file():
        return path
    return require_one(path, find_folders(path, (FILE_NAME,))) / FILE_NAME


def require_one(place: Path, found: Sequence[Path]) -> Path:
    """Return the only run that was found in a place.

    Raises:
        LedgerError: if there are several.
    """
    if len(found) > 1:
        shown = ", ".join(each.name for each in found)
        raise LedgerError(f"{place} holds several runs: {shown}. Pass the folder of one.")
    return found[0]


def find_folders(place: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders of runs: the given one, or those directly below it.

    Args:
        place: the folder.
        names: of the files of which a run has at least one there.

    Raises:
        LedgerError: if there is none.
    """

    def is_run(folder: Path) -> bool:
        return any((folder / name).is_file() for name in names)

    below = sorted(place.glob("*/")) if place.is_dir() else []
    found = [place] if is_run(place) else [folder for folder in below if is_run(folder)]
    if not found:
        raise LedgerError(
            f"There is no {' or '.join(names)} in {place} or directly below it. A run writes it "
            'next to its checkpoints, unless Trainer(ledger="off") is set. Pass the folder of a '
            "run."
        )
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a ledger's chain, with their ends; errors are as below."""
    return (data for data in read_all_lines(path) if not is_scores(data))


def read_all_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a ledger, with their ends, also those of scores.

    Raises:
        LedgerError: if the ledger cannot be read.
    """
    try:
        with path.open("rb") as handle:
            yield from handle
    except OSError as error:
        raise LedgerError(f"The ledger {path} cannot be read: {error}.") from error


def parse_header(data: bytes, path: Path) -> dict[str, Any]:
    """Return the content of a ledger's first line.

    Raises:
        LedgerError: if it is not a header, or that of another version.
    """
    try:
        header = json.loads(data)
        version = header["ledger"]
        header["run"], header["every"], header["after"]
    except (ValueError, LookupError, TypeError) as error:
        raise LedgerError(
            f"{path} is not a ledger, or its first line is damaged. Replace it by a copy, or "
            "rename it to continue without it."
        ) from error
    if version != line.VERSION:
        raise LedgerError(
            f"{path} is a ledger of version {version}, but this version of Helios reads version "
            f"{line.VERSION}. Use the version of Helios that wrote it."
        )
    found: dict[str, Any] = header
    return found


@dataclass
class RunScores:
    """The scores of a run.

    Attributes:
        by_iteration: the scores of each validation by name, by the iteration that it follows.
        unscored: names of scores that are not compared, as ``Model.unscored`` says.
    """

    by_iteration: dict[int, Mapping[str, float]] = field(default_factory=dict)
    unscored: frozenset[str] = frozenset()

    def add(self, data: bytes) -> int:
        """Add a line of scores; see :mod:`helios.ledger.line`.

        Returns:
            The iteration that it follows.

        Raises:
            LedgerError: if the line has no scores.
        """
        try:
            content = json.loads(data)
            after = int(content["after"])
            scores = {name: read_float(digits) for name, digits in content["scores"].items()}
            self.unscored |= frozenset(content.get("unscored", ()))
        except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
            raise LedgerError("lacks entries of a line of scores") from error
        self.by_iteration[after] = scores
        return after


def read_scores(ledger: Path) -> RunScores:
    """Return the scores of the run that a ledger belongs to.

    Raises:
        LedgerError: if they cannot be read.
    """
    lines = read_all_lines(ledger)
    parse_header(next(lines, b""), ledger)
    found = RunScores()
    for data in filter(is_scores, lines):
        # `verify` names a line that is wrong; one that is being written has no end.
        with contextlib.suppress(LedgerError):
            found.add(data)
    return found


def read_last_losses(path: Path) -> dict[str, float]:
    """Return the losses of the last iteration of a ledger, from its end; empty without any.

    Raises:
        LedgerError: if the file cannot be read.
    """
    for data in islice(_read_backwards(path), _MOST_LINES):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, struct.error):
            losses = json.loads(data)["loss"].items()
            return {name: read_float(digits) for name, digits in losses if digits is not None}
    return {}


def read_lines_before(path: Path, mark: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the lines of a ledger's chain that a checkpoint covers, from the last to the first.

    Args:
        path: the ledger.
        mark: its size and hash in the checkpoint; nothing is yielded if they do not match.

    Raises:
        LedgerError: if the file cannot be read.
    """
    lines = _read_backwards(path, mark["size"])
    last = next(lines, b"")
    if last.endswith(end_of(mark.get("tail", mark["hash"]))):
        yield from (data for data in chain((last,), lines) if not is_scores(data))


def _read_backwards(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a ledger, or of its first bytes, from the last to the first."""
    try:
        with path.open("rb") as handle:
            place, data = handle.seek(0, 2) if size is None else size, b""
            while place > 0:
                begin = max(0, place - _BLOCK)
                handle.seek(begin)
                # The first line may begin in the block before.
                data, *lines = (handle.read(place - begin) + data).splitlines(keepends=True)
                place = begin
                yield from reversed(lines)
    except OSError as error:
        raise LedgerError(f"The ledger {path} cannot be read: {error}.") from error
    if data:
        yield data

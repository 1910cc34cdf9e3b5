"""The points of a run on the disk, exact over resumes: the source of what a server shows.

A resumed run repeats the rows after its checkpoint, some of which were sent already. Each repeated
row is compared with the stored one, which stays, with its time: what is sent twice is the same.

Pictures are PNG files: the same picture gives the same bytes, and the same name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
import struct
import uuid
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from helios.errors import UsageError
from helios.storage import files
from helios.storage.folder_lock import LOCK_NAME, FolderLock
from helios.storage.row_file import RowFile
from helios.tracking.tracker_folder import SEALED, TrackedRun, TrackerFolder

_LOGGER = logging.getLogger(__name__)

WRITER_LOCK_NAME = ".helios-writer-lock"
"""Name of the lock file of the tracker that writes; the process that sends has its own."""


class Repeat(Enum):
    """How a row compares with the stored one that it repeats."""

    NEW = "no row follows"
    SAME = "equal but for the time"
    OTHER_VALUES = "the same names at the same iteration"
    OTHER_ROW = "another iteration, or other names"


class PointFile(RowFile):
    """A row file that keeps the rows after a mark until training has repeated them."""

    def restore(self, mark: Mapping[str, Any] | None = None) -> None:
        """Open the file at a mark; without one, at its beginning."""
        self._ahead: deque[bytes] = deque()
        if mark is None and self.path.exists():
            mark = {"path": str(self.path), "size": 0, "digest": hashlib.sha256().hexdigest()}
        super().restore(mark)

    def _drop_rest(self) -> None:
        with self.path.open("rb") as handle:
            handle.seek(self._size)
            rest = handle.read()
        lines = rest.splitlines(keepends=True)
        whole = list(itertools.takewhile(_is_row, lines))
        if len(whole) < len(lines):
            # A kill has cut the last row off, or a crash of the machine has left anything there.
            files.truncate(self.path, self._size + sum(map(len, whole)))
        self._ahead = deque(whole)

    @property
    def size(self) -> int:
        """Bytes of the rows that training has logged, or repeated."""
        return self._size

    @property
    def last_iteration(self) -> int | None:
        """Iteration of the last stored row; ``None`` without rows."""
        with self.path.open("rb") as handle:
            last = deque(handle, maxlen=1)
        return json.loads(last[0])["iteration"] if last else None

    @property
    def next_iteration(self) -> int | None:
        """Iteration of the next stored row that training has not repeated."""
        return json.loads(self._ahead[0])["iteration"] if self._ahead else None

    def compare(self, row: Mapping[str, Any]) -> Repeat:
        """Return how a row compares with the next stored one."""
        if not self._ahead:
            return Repeat.NEW
        stored = json.loads(self._ahead[0])
        if _identify(stored) != _identify(row):
            return Repeat.OTHER_ROW
        return Repeat.SAME if _content(stored) == _content(row) else Repeat.OTHER_VALUES

    def keep_stored(self) -> None:
        """Go past the next stored row, which training has repeated."""
        self._count(self._ahead.popleft())

    def cut(self) -> None:
        """Drop the stored rows that training has not repeated."""
        files.truncate(self.path, self._size)
        self._ahead.clear()


def _is_row(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and bool(_identify(json.loads(line)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _identify(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["epoch"], row["iteration"], row.get("picture"), list(row.get("values", {})))


def _content(row: Mapping[str, Any]) -> str:
    # As text, because 0.0 equals -0.0.
    return json.dumps({name: value for name, value in row.items() if name != "time"})


class PointStore:
    """The points of a run, and the run on the server that they belong to.

    Args:
        folder: the folder of the tracker.
        run: the run to begin if the folder has none; its key is not used.
        forks: whether values other than the stored ones begin a new run on the server: the start
            has no checkpoint, or went back on purpose. Otherwise stored values stay.
    """

    def __init__(self, folder: TrackerFolder, run: TrackedRun, *, forks: bool) -> None:
        self.folder = folder
        self.run = replace(run, key=uuid.uuid4().hex)
        self._forks = forks
        self._file = PointFile(folder.points)
        self._lock = FolderLock(
            folder.path, name=WRITER_LOCK_NAME, remedy="give each Tracker a folder of its own"
        )
        self._has_warned = False
        self._sealed: int | None = None

    def open(self, mark: Mapping[str, Any] | None) -> None:
        """Open the points where a checkpoint has them; ``None`` without a checkpoint.

        Raises:
            FolderInUseError: if another tracker writes to the folder.
            UsageError: if the folder cannot be read.
        """
        self._lock.acquire()
        try:
            self._open(mark)
            # A folder that was moved aside has taken its lock along.
            self._lock.renew()
        except BaseException:
            self._file.close()
            self._lock.release()
            raise

    def _open(self, mark: Mapping[str, Any] | None) -> None:
        found = self.folder.read_run()
        if mark is None and found is not None and not self._is_alike(found):
            aside = files.rename_aside(self.folder.path)
            _LOGGER.warning(
                "%s has the points of another run, with another target or other hyper-parameters. "
                "It was moved to %s, and a new run begins.",
                self.folder.path,
                aside,
            )
            found = None
        if found is not None and found.cut is not None:
            self._finish_cut(found)
        self._file.restore(mark)
        self.run = self._continue(found, mark)
        self.folder.write_run(self.run)
        sealed = self.folder.read_progress(self.run.key).sent.get(SEALED)
        if sealed and sealed == self.folder.size:
            self._sealed = self._file.last_iteration

    def _is_alike(self, found: TrackedRun) -> bool:
        return (found.target, found.params) == (self.run.target, self.run.params)

    def _continue(self, found: TrackedRun | None, mark: Mapping[str, Any] | None) -> TrackedRun:
        """Return the run of this start: the stored one, as far as it is the same."""
        if found is None:
            return self.run
        if mark is not None and self._file.size < mark["size"]:
            _LOGGER.warning("%s: a new run begins on the server.", self.folder.path)
            return self.run
        if found.params != self.run.params:
            _LOGGER.warning(
                "%s: the hyper-parameters differ from those of the run's first start, which stay: "
                "%s, not %s.",
                self.folder.path,
                found.params,
                self.run.params,
            )
        if found.target != self.run.target:
            _LOGGER.warning(
                "%s: the target is another one now, where a new run begins, with all points.",
                self.folder.path,
            )
            return replace(self.run, params=found.params, created=found.created)
        return replace(
            found, run_folder=self.run.run_folder, since=self.run.since, outcome="", cut=None
        )

    def add(self, row: Mapping[str, Any]) -> bool:
        """Append a row, or keep the stored one that it repeats.

        Args:
            row: ``epoch``, ``iteration``, ``time`` and either ``values`` or ``picture``.

        Returns:
            Whether training has taken another course, so that a new run begins on the server.
        """
        repeat = self._file.compare(row)
        is_late = repeat is Repeat.NEW and row["iteration"] == self._sealed
        if is_late or repeat is Repeat.OTHER_ROW or (repeat is Repeat.OTHER_VALUES and self._forks):
            self._fork(row["iteration"])
            self._append(row)
            return True
        if repeat is Repeat.NEW:
            self._append(row)
            return False
        if repeat is Repeat.OTHER_VALUES:
            self._warn(row)
        self._file.keep_stored()
        return False

    def end(self) -> bool:
        """Note that the training is finished; returns whether a new run begins on the server.

        Stored points that it has not repeated are those of a longer training.
        """
        stored = self._file.next_iteration
        if stored is None:
            return False
        self._fork(stored)
        return True

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(row, allow_nan=False) + "\n")

    def _warn(self, row: Mapping[str, Any]) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "%s: numbers that the resumed run repeats differ from those that were sent, first "
                "at iteration %d: %s. The server keeps the earlier ones up to where the last start "
                "ended.",
                self.folder.path,
                row["iteration"],
                row.get("values", row.get("picture")),
            )

    def _fork(self, iteration: int) -> None:
        """Begin a new run on the server, with the points up to here."""
        size = self._file.mark()["size"]
        aside = files.find_free(self.folder.path)
        # Reading the lock file would release the lock.
        shutil.copytree(
            self.folder.path, aside, ignore=shutil.ignore_patterns(LOCK_NAME, WRITER_LOCK_NAME)
        )
        _LOGGER.warning(
            "%s: training has taken another course than the stored points from iteration %d on. "
            "A new run with all points begins on the server. The earlier one stays there as it is; "
            "its points were copied to %s.",
            self.folder.path,
            iteration,
            aside,
        )
        self.run = replace(self.run, key=uuid.uuid4().hex, cut=size)
        self._sealed = None
        self.folder.write_run(self.run)
        self._file.cut()
        self._forget_cut()

    def _finish_cut(self, found: TrackedRun) -> None:
        """Cut the points where a kill has interrupted that."""
        assert found.cut is not None
        if self.folder.size > found.cut:
            files.truncate(self.folder.points, found.cut)

    def _forget_cut(self) -> None:
        self.run = replace(self.run, cut=None)
        self.folder.write_run(self.run)

    def mark(self) -> dict[str, Any]:
        """Return size and digest of the rows for a checkpoint, once they are on the disk."""
        return self._file.mark()

    def close(self, outcome: str) -> None:
        """Note how the start has ended, and close the file."""
        self.run = replace(self.run, outcome=outcome)
        try:
            self.folder.write_run(self.run)
        finally:
            self._file.close()
            self._lock.release()


_KINDS = {1: 0, 3: 2, 4: 6}
"""Colour types of PNG, by the number of channels."""
_DIGITS = 32
_LEVEL = 1


def as_pixels(name: str, image: torch.Tensor | npt.NDArray[Any], axes: str) -> npt.NDArray[Any]:
    """Return a picture as bytes, of the shape ``(height, width, channels)``.

    Args:
        name: its name, for messages.
        image: floats in [0, 1], or bytes.
        axes: ``"CHW"``, ``"HWC"`` or ``"HW"``.

    Raises:
        UsageError: for another shape, or other values.
    """
    found = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if axes not in ("CHW", "HWC", "HW") or found.ndim != len(axes):
        raise UsageError(
            f"The picture {name!r} must have axes CHW, HWC or HW, got the shape {found.shape} with "
            f"dataformats={axes!r}. Pass one picture, and its dataformats."
        )
    found = found[..., None] if axes == "HW" else found
    found = found.transpose(1, 2, 0) if axes == "CHW" else found
    if found.shape[2] not in _KINDS or not found.size:
        raise UsageError(
            f"The picture {name!r} must have 1, 3 or 4 channels and no empty axis, got the shape "
            f"{found.shape} (height, width, channels). Convert it."
        )
    if found.dtype != np.uint8:
        if found.dtype.kind != "f" or not ((found >= 0) & (found <= 1)).all():
            raise UsageError(
                f"The picture {name!r} must be floats in [0, 1] or bytes, got {found.dtype} in "
                f"[{found.min()}, {found.max()}]. Scale it."
            )
        found = np.rint(found * 255).astype(np.uint8)
    return np.ascontiguousarray(found)


def encode_png(pixels: npt.NDArray[Any]) -> bytes:
    """Return pixels of :func:`as_pixels` as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    # Each line begins with the number of its filter; 0 is none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), _LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def store_picture(folder: Path, pixels: npt.NDArray[Any]) -> str:
    """Write a picture into a folder, unless it is there, and return the name of the file.

    The name is a digest of the pixels, because libraries compress them to different bytes.
    """
    digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
    path = folder / f"{digest[:_DIGITS]}.png"
    if not path.exists():
        files.make_folder(folder)
        with files.replacing(path) as partial, files.create(partial) as handle:
            files.write(handle, encode_png(pixels))
            files.fsync(handle)
    return path.name

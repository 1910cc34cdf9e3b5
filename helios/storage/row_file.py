"""A file of rows that stays exact when a run is resumed: no row is duplicated or lost.

A checkpoint records the size and a digest of the file (:meth:`RowFile.mark`). A resume truncates
the file to that size, so rows of steps that are repeated occur once. Existing rows are never
overwritten: a file that does not match the mark is moved aside.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from helios.errors import UsageError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20


class RowFile:
    """A text file that rows are appended to; closed until :meth:`restore` is called.

    Args:
        path: the file; a missing folder is created. A relative path is resolved against the
            current working directory.
        header: the first line of a new file, with its line end; empty for none.
    """

    def __init__(self, path: str | Path, header: str = "") -> None:
        self._path = Path(path).absolute()
        self._header = header.encode()
        self._handle: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._size = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the path and the header; in another process, the file is closed."""
        return {"_path": self._path, "_header": self._header}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a closed file, as the constructor creates it."""
        vars(self).update(state)
        self._handle, self._digest, self._size = None, hashlib.sha256(), 0

    @property
    def path(self) -> Path:
        """The absolute path of the file."""
        return self._path

    @property
    def is_open(self) -> bool:
        """Whether rows can be appended."""
        return self._handle is not None

    @property
    def has_rows(self) -> bool:
        """Whether the open file contains more than its header."""
        return self._size > len(self._header)

    def restore(self, mark: Mapping[str, Any] | None = None) -> None:
        """Open the file: a new one, or an existing one truncated to a mark.

        An existing file that does not match the mark, or for which there is no mark, is renamed to
        ``<stem>.before-<n><suffix>`` with a warning, unless it contains no rows.

        Args:
            mark: the result of :meth:`mark` in the checkpoint; ``None`` for a new file.
        """
        self.close()
        files.make_folder(self._path.parent)
        if mark is None:
            self._move_aside(
                "%s already exists, from another run or a start without a checkpoint. "
                "It was moved to %s, and a new file is started."
            )
        elif self._cut_back(mark):
            self._handle = self._path.open("ab")
            return
        self._digest, self._size = hashlib.sha256(), 0
        self._handle = files.create(self._path)
        self.append(self._header.decode())

    def append(self, text: str) -> None:
        """Append complete rows with their line ends, and pass them to the operating system.

        Raises:
            UsageError: if the file is not open.
        """
        data, handle = text.encode(), self._get_handle()
        files.write(handle, data)
        handle.flush()
        self._count(data)

    def mark(self) -> dict[str, Any]:
        """Wait until all rows are on the disk, and return the file's size and digest.

        Returns:
            The argument of :meth:`restore`: the path, the size in bytes and a digest.

        Raises:
            UsageError: if the file is not open.
        """
        files.fsync(self._get_handle())
        return {
            "path": str(self._path),
            "size": self._size,
            "digest": self._digest.hexdigest(),
        }

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.close()

    def _get_handle(self) -> BinaryIO:
        if self._handle is None:
            raise UsageError(f"RowFile {self._path} is not open. Call restore() first.")
        return self._handle

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)

    def _cut_back(self, mark: Mapping[str, Any]) -> bool:
        """Truncate the file to a mark; logs a warning and returns False if that is impossible."""
        if not self._path.exists():
            _LOGGER.warning(
                "%s is missing. A new file is started, without the rows up to the checkpoint (%d "
                "bytes). To keep them, stop and put the file back: at the checkpoint, its path was "
                "%s.",
                self._path,
                mark["size"],
                mark["path"],
            )
            return False
        size = self._path.stat().st_size
        self._read_up_to(mark["size"])
        if self._size == mark["size"] and self._digest.hexdigest() == mark["digest"]:
            if size > mark["size"]:
                self._drop_rest()
            return True
        self._move_aside(
            f"%s was changed: its first {mark['size']} bytes differ from the checkpoint. It was "
            "moved to %s, and a new file is started, without the rows up to the checkpoint. To "
            "keep them, stop and put the right file back."
        )
        return False

    def _drop_rest(self) -> None:
        """Drop the rows after the mark: training repeats them."""
        files.truncate(self._path, self._size)

    def _read_up_to(self, size: int) -> None:
        self._digest, self._size = hashlib.sha256(), 0
        with self._path.open("rb") as handle:
            while self._size < size:
                data = handle.read(min(_CHUNK_BYTES, size - self._size))
                if not data:
                    return
                self._count(data)

    def _move_aside(self, text: str) -> None:
        """Rename an existing file with rows, and log a warning with the old and new path."""
        if not self._path.exists():
            return
        # A kill may have cut off the header.
        may_be_empty = self._path.stat().st_size <= len(self._header)
        if may_be_empty and self._header.startswith(self._path.read_bytes()):
            return
        _LOGGER.warning(text, self._path, files.rename_aside(self._path))

"""A part of a file, as a file that is read only."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, final


@final
class FilePart(io.RawIOBase):
    """A part of a file; to be read through ``io.BufferedReader``, which closes it.

    Args:
        path: the file.
        offset: where the part begins in it.
        length: its number of bytes.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset, self._length, self._place = offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}
        self._place = bases[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read from the present place on."""
        rest = max(0, self._length - self._place)
        self._file.seek(self._offset + self._place)
        count = self._file.readinto(memoryview(buffer)[:rest]) or 0
        self._place += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

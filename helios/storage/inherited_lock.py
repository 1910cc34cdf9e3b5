"""A lock that a process shares with one that it starts, and that is free once both have ended.

The lock of a folder (``folder_lock``) is not inherited, so that no loader worker keeps it. This one
is for a process that does the work of its parent, and may live on for a moment after it is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helios.errors import FolderInUseError

if sys.platform != "win32":
    import fcntl

_STDIN = 0


class InheritedLock:
    """A lock on a file.

    On Windows, nothing is locked.

    Args:
        path: the lock file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            FolderInUseError: if another process has it, or one that it has started.
        """
        if sys.platform == "win32" or self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise FolderInUseError(
                f"A process that sends what {self._path.parent} contains, for an earlier start, "
                "is still running. Wait for its end, or kill it."
            ) from error
        self._descriptor = descriptor

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let processes that are started in this block inherit the lock, as standard input."""
        if self._descriptor is None:
            yield
            return
        before = os.dup(_STDIN)
        os.dup2(self._descriptor, _STDIN)
        try:
            yield
        finally:
            os.dup2(before, _STDIN)
            os.close(before)

    def release(self) -> None:
        """Release the lock of this process; those that have inherited it keep it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

"""Locks a folder so that only one run at a time writes to it.

It is a POSIX record lock: it ends with its process, and loader workers do not inherit it. A process
runs one call at a time, so a second run is always in another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from helios.errors import FolderInUseError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)

LOCK_NAME = ".helios-lock"
"""Name of the lock file in a run's folder, which also describes its owner."""


class FolderLock:
    """A lock on a folder; a context manager that acquires and releases it.

    If the file system does not support locks, or the file cannot be created, a warning is logged
    once, and nothing is locked.

    Attributes:
        path: the lock file.
        owner: its description of this process; empty as long as nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self.owner = ""
        self._descriptor = -1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock, or make sure of it: its file may have been deleted, or copied.

        Raises:
            FolderInUseError: if another run holds it; the message describes that run.
        """
        try:
            while self._descriptor < 0 or not self._is_locked():
                self._close()
                files.make_folder(self.path.parent)
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 4096, 0).decode(errors="replace")
            self._close()
            raise FolderInUseError(
                f"The folder {self.path.parent} is in use by another run: {owner}. Wait for that "
                "run to end or stop it, and start again; or give this run another chkpt_root, or "
                "its model another save_name."
            ) from error
        except (OSError, ImportError) as error:
            self._close()
            _LOGGER.warning(
                "The folder %s could not be locked (%s). Do not start a second run in it while "
                "this one is running.",
                self.path.parent,
                error,
            )

    def _is_locked(self) -> bool:
        import fcntl  # Windows has none.

        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            # Somebody may have removed the file since it was opened.
            is_there = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False
        if is_there and not self.owner:
            self.owner = f"process {os.getpid()} on {socket.gethostname()}"
            # Other machines read it, so it must not stay in this machine's cache. On a full disk,
            # their messages do not name the owner.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, self.owner.encode(), 0)
                os.fsync(self._descriptor)
        return is_there

    def release(self) -> None:
        """Release the lock and remove its file; does nothing if it is not held."""
        with contextlib.suppress(OSError):
            if self.owner and self._is_locked():
                # Before it is unlocked: afterwards, it may be the file of the next run.
                files.unlink(self.path)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.owner = -1, ""

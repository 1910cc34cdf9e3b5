"""Locks a folder so that only one run at a time writes to it.

It is a POSIX record lock, which the system releases when the process ends. Child processes do not
inherit it, so it is released even if loader workers outlive a killed run. It is also released when
the process closes any descriptor of the file, so the file is opened only once.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

from helios.errors import FolderInUseError
from helios.storage import files

if sys.platform != "win32":
    import fcntl

_LOGGER = logging.getLogger(__name__)

LOCK_NAME = ".helios-lock"
"""Name of the lock file in a run's folder, which also describes its owner."""

_HELD_BY_ANOTHER = frozenset((errno.EACCES, errno.EAGAIN))
_MAX_BYTES = 4096
_PATIENCE = 10.0
_PAUSE = 0.1


class _Held:
    """The files that this process has locked: their device and inode, and the owner's pid.

    A record lock excludes other processes, not a second training in the same one. That is checked
    before the file is opened, because closing it would release the first training's lock.
    """

    owners: ClassVar[dict[tuple[int, int], int]] = {}
    guard: ClassVar[threading.Lock] = threading.Lock()


class FolderLock:
    """A lock on the folder of a run; a context manager that acquires and releases it.

    If the file system does not support locks, or the file cannot be created, a warning is logged
    once, and nothing is locked.

    Args:
        folder: the folder of the run.
        makes_folder: whether to create a missing folder; if not, nothing is locked then.
        name: name of the lock file; locks with different names do not exclude each other.
    """

    def __init__(
        self,
        folder: Path,
        *,
        makes_folder: bool = True,
        name: str = LOCK_NAME,
    ) -> None:
        self._folder = folder
        self._makes_folder = makes_folder
        self._name = name
        self._descriptor: int | None = None
        self._key: tuple[int, int] | None = None
        self._has_warned = False

    @property
    def path(self) -> Path:
        """The lock file."""
        return self._folder / self._name

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock; does nothing if it is already held.

        Raises:
            FolderInUseError: if another run holds it; the message describes that run.
        """
        try:
            if not self.is_held and (self._makes_folder or self._folder.is_dir()):
                files.make_folder(self._folder)
                with _Held.guard:
                    self._take()
        except OSError as error:
            self._warn(error)

    @property
    def token(self) -> str:
        """The description of the owner in the lock file; empty if the lock is not held here."""
        return "" if self._descriptor is None else _read(self._descriptor)

    def is_shown(self, token: str) -> bool:
        """Whether this process sees the folder that another process has locked.

        On a network file system, a file that another machine created may become visible late, so
        this method polls for up to ten seconds.

        Args:
            token: the :attr:`token` of the process that holds the lock.
        """
        deadline = time.monotonic() + _PATIENCE
        while not self._shows(token):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _shows(self, token: str) -> bool:
        for folder in (self._folder.parent, self._folder):
            # A failed lookup is cached until the parent folder is opened.
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        try:
            return self.path.read_text() == token if token else self._folder.is_dir()
        except (OSError, ValueError):
            return False

    def renew(self) -> None:
        """Acquire the lock again if the folder or the lock file was deleted.

        Raises:
            FolderInUseError: if another run has acquired it in the meantime.
        """
        if self.is_held and not self._is_kept():
            if _identify(self._folder) is None:
                _LOGGER.warning(
                    "The folder %s disappeared during the run: it was deleted or moved, or its "
                    "disk is gone. It is created again for new checkpoints; earlier ones are not "
                    "in it.",
                    self._folder,
                )
            self._let_go()
        self.acquire()

    def _is_kept(self) -> bool:
        # Code in this process that copied the file has closed it, which released the lock.
        try:
            return self._key == _identify(self.path) and self._lock()
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock and remove its file; does nothing if it is not held.

        A process forked from the owner does not remove the file.
        """
        if self._is_owned and self._key == _identify(self.path):
            # Before it is unlocked: afterwards, it may be the file of the next run.
            with contextlib.suppress(OSError):
                files.unlink(self.path, missing_ok=True)
        self._let_go()

    @property
    def _is_owned(self) -> bool:
        return self._key is not None and _Held.owners.get(self._key) == os.getpid()

    def _take(self) -> None:
        while not self.is_held:
            if _Held.owners.get(_identify(self.path) or (0, 0)) == os.getpid():
                raise self._describe("another training in this process has locked it")
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._descriptor = descriptor
            try:
                if not self._lock():
                    raise self._describe(_read_owner(descriptor))
            except BaseException:
                self._close()
                raise
            status = os.fstat(descriptor)
            self._key = (status.st_dev, status.st_ino)
            if self._key != _identify(self.path):
                # Its owner removed it after it was opened here, so there is another file now.
                self._close()
                continue
            _Held.owners[self._key] = os.getpid()
            _write_owner(descriptor)

    def _lock(self) -> bool:
        """Lock the open file without waiting; returns whether it succeeded."""
        assert self._descriptor is not None
        if sys.platform == "win32":
            raise OSError(errno.ENOSYS, "this system does not support POSIX record locks")
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                return False
            raise
        return True

    def _let_go(self) -> None:
        with _Held.guard:
            if self._key is not None:
                _Held.owners.pop(self._key, None)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._key = None

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _LOGGER.warning(
            "The folder %s could not be locked (%s). Do not start a second run in it while this "
            "one is running.",
            self._folder,
            error,
        )

    def _describe(self, owner: str) -> FolderInUseError:
        return FolderInUseError(
            f"The folder {self._folder} is in use by another run: {owner}. Wait for that run to "
            "end or stop it, and start again; or give this run another chkpt_root, or its model "
            "another save_name."
        )


def _identify(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a path without opening it; ``None`` if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _write_owner(descriptor: int) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
    }
    # On a full disk, the description is missing from messages, but the lock is held.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        # Other machines read the file, so it must not stay in this machine's cache.
        os.fsync(descriptor)


def _read(descriptor: int) -> str:
    try:
        return os.pread(descriptor, _MAX_BYTES, 0).decode()
    except (OSError, ValueError):
        return ""


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(_read(descriptor))
        return f"process {owner['pid']} on {owner['host']} locked it at {owner['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process has locked it"

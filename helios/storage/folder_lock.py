"""One run in a folder at a time: a lock that the system takes back when its process ends.

It is a POSIX record lock: children do not hold it, so it is free at once when a run is killed while
its loader workers live on. Such a lock also vanishes when its process closes any descriptor of the
file, so the file is opened once, and nowhere else.
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
"""Name of the file in a run's folder that is locked, and says by whom."""

_HELD_BY_ANOTHER = frozenset((errno.EACCES, errno.EAGAIN))
_MAX_BYTES = 4096
_PATIENCE = 10.0
_PAUSE = 0.1


class _Held:
    """The lock files that this process has locked, by device and number, and since which fork.

    The system excludes processes, not two trainings in one; and it must be known before the file
    is opened, because closing it again would take the lock from the other training.
    """

    owners: ClassVar[dict[tuple[int, int], int]] = {}
    guard: ClassVar[threading.Lock] = threading.Lock()


class FolderLock:
    """Keeps a second run out of a folder; a context manager that takes and releases the lock.

    Where the file system knows no locks, or the file cannot be made, one warning says so, and
    nothing is locked.

    Args:
        folder: the folder of the run.
        makes_folder: whether to make the folder where it is missing; else nothing is locked then.
    """

    def __init__(self, folder: Path, *, makes_folder: bool = True) -> None:
        self._folder = folder
        self._makes_folder = makes_folder
        self._descriptor: int | None = None
        self._key: tuple[int, int] | None = None
        self._has_warned = False

    @property
    def path(self) -> Path:
        """The file that is locked."""
        return self._folder / LOCK_NAME

    @property
    def is_held(self) -> bool:
        """Whether the lock was taken."""
        return self._descriptor is not None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock; what is held already is held on.

        Raises:
            FolderInUseError: if another run holds it, with what is known of that run.
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
        """What the file says of its owner; empty where it is not held here, or says nothing."""
        return "" if self._descriptor is None else _read(self._descriptor)

    def is_shown(self, token: str) -> bool:
        """Whether this process sees the folder in which another one, which holds it, has made it.

        A network file system may show late what another machine has made: it is asked again for
        some seconds.

        Args:
            token: that of the lock which the other process has taken.
        """
        deadline = time.monotonic() + _PATIENCE
        while not self._shows(token):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _shows(self, token: str) -> bool:
        for folder in (self._folder.parent, self._folder):
            # What was looked up in vain is remembered until the folder above it is opened.
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        try:
            return self.path.read_text() == token if token else self._folder.is_dir()
        except (OSError, ValueError):
            return False

    def renew(self) -> None:
        """Take the lock again where it was lost: the folder was deleted, or the file was.

        Raises:
            FolderInUseError: if another run has taken it in the meantime.
        """
        if self.is_held and not self._is_kept():
            if _identify(self._folder) is None:
                _LOGGER.warning(
                    "The folder %s is no longer found while its run goes on: deleted, moved away, "
                    "or its disk is gone. It is made again for the checkpoints to come; older ones "
                    "are not in it.",
                    self._folder,
                )
            self._let_go()
        self.acquire()

    def _is_kept(self) -> bool:
        # Whoever has copied the file in this process has closed it, and so given up the lock.
        try:
            return self._key == _identify(self.path) and self._lock()
        except OSError:
            return False

    def release(self) -> None:
        """Give the lock back, and remove its file; without a lock nothing happens.

        A process that was forked from the one that holds it removes nothing.
        """
        if self._is_owned and self._key == _identify(self.path):
            # While it is locked: behind that, it may be the file of the next run.
            with contextlib.suppress(OSError):
                files.unlink(self.path, missing_ok=True)
        self._let_go()

    @property
    def _is_owned(self) -> bool:
        return self._key is not None and _Held.owners.get(self._key) == os.getpid()

    def _take(self) -> None:
        while not self.is_held:
            if _Held.owners.get(_identify(self.path) or (0, 0)) == os.getpid():
                raise self._describe("another training in this same process holds it")
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
                # Its owner has removed it after it was opened here: another file counts now.
                self._close()
                continue
            _Held.owners[self._key] = os.getpid()
            _write_owner(descriptor)

    def _lock(self) -> bool:
        """Lock the open file; returns whether that is possible now."""
        assert self._descriptor is not None
        if sys.platform == "win32":
            raise OSError(errno.ENOSYS, "this system has no locks of that kind")
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
            "The folder %s could not be locked (%s). Nothing keeps a second run out of it: start "
            "none there while this one goes on.",
            self._folder,
            error,
        )

    def _describe(self, owner: str) -> FolderInUseError:
        return FolderInUseError(
            f"The folder {self._folder} must belong to one run at a time, and it is in use: "
            f"{owner}. Wait for its end or stop it, and start again; or give this run another "
            "chkpt_root, or its model another save_name."
        )


def _identify(path: Path) -> tuple[int, int] | None:
    """Return what file a name stands for now, without opening it; ``None`` for none."""
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
    # A full disk takes the words from the message of a second run, and not the lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        # Other machines read it: kept back here, it would not say by whom.
        os.fsync(descriptor)


def _read(descriptor: int) -> str:
    try:
        return os.pread(descriptor, _MAX_BYTES, 0).decode()
    except (OSError, ValueError):
        return ""


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(_read(descriptor))
        return f"process {owner['pid']} on {owner['host']} holds it since {owner['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process holds it"

"""The folder of a run: its path, its lock, and whether all processes see it.

One run writes to a folder at a time. Rank 0 writes, and every process reads at the next start.
"""

from __future__ import annotations

from contextlib import ExitStack

from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.errors import ArgumentError, CheckpointError
from helios.replicas.replicas import Replicas
from helios.startup.launching.on_all_ranks import on_each, on_first
from helios.startup.options.checkpoint_options import CheckpointOptions
from helios.storage import files
from helios.storage.folder_lock import FolderLock

SHARING = (
    "All processes must see the folder chkpt_root: put it on a file system that the machines "
    "share, under the same path."
)
"""Remedy if a process does not see what another one has written."""


def open_folder(options: CheckpointOptions, save_name: str) -> RunFolder | None:
    """Return the folder of a run, or ``None`` without ``chkpt_root``.

    Raises:
        ArgumentError: if there is a file with its name.
    """
    if options.chkpt_root is None:
        return None
    path = options.chkpt_root / save_name
    if path.exists() and not path.is_dir():
        raise ArgumentError(
            f"The run's folder, chkpt_root/<save_name>, must be a folder, got the file {path}. "
            "Move the file away, or give the model another save_name."
        )
    return RunFolder(path, options.store or CheckpointStore())


def require_writable(options: CheckpointOptions, save_name: str) -> None:
    """Refuse a folder that cannot be written to, before the first save would fail.

    Raises:
        ArgumentError: if the run saves, and its folder cannot be created or written to.
    """
    folder = open_folder(options, save_name)
    if folder is None or not options.can_save:
        return
    try:
        files.check_writable(folder.path)
    except OSError as error:
        raise ArgumentError(
            "Trainer(chkpt_root=...) must be a folder that can be created and written to, got "
            f"{str(options.chkpt_root)!r}: {error}. Pass another one, or correct its permissions. "
            "Omit chkpt_frequency to train without checkpoints."
        ) from error


def lock_folder(
    options: CheckpointOptions, save_name: str, stack: ExitStack, *, team: Replicas
) -> FolderLock | None:
    """Lock the folder of a run for this call, before anything in it is read.

    A run that only loads creates no folder, but locks an existing one, because it also moves
    damaged files aside.

    Args:
        options: where the folder is, and whether the run saves.
        save_name: name of the run's folder.
        stack: releases the lock.
        team: the processes; rank 0 holds the lock.

    Returns:
        The lock, ``None`` without ``chkpt_root``.

    Raises:
        FolderInUseError: in all processes, if another run holds it.
        CheckpointError: in all processes, if one of them does not see the folder for saving.
    """
    folder = open_folder(options, save_name)
    if folder is None:
        return None
    lock = FolderLock(folder.path, makes_folder=options.can_save)
    stack.callback(lock.release)

    def take() -> str | None:
        lock.acquire()
        return lock.token if folder.path.is_dir() else None

    token = on_first(team, take)
    if options.can_save and token is not None:
        on_each(team, lambda: _require_sight(lock, token, team))
    return lock


def _require_sight(lock: FolderLock, token: str, team: Replicas) -> None:
    """Check that a process sees the folder that rank 0 has locked: it must resume from there."""
    if team.rank != 0 and not lock.is_shown(token):
        raise CheckpointError(
            f"Rank 0 of {team.num_processes} saves to {lock.path.parent}, but rank {team.rank} "
            f"does not see the same folder. {SHARING}"
        )

"""Finds where a run starts: from a checkpoint that ``Trainer(resume=...)`` selects, or anew.

A run's folder belongs to one run; ``changes`` says what identifies it. One run writes to a
folder at a time: rank 0 writes, and every process reads at the next start.

The folder is read twice. :func:`find_stored` returns the number of replicas, on which the number of
processes depends: only these processes can take the lock, and until then another run may change the
folder. Therefore :func:`find_origin` searches again under the lock, in one listing, and its
:class:`Origin` holds everything that the call needs from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded, RunFolder
from helios.errors import ArgumentError, CheckpointError, DamagedCheckpointError, RunMismatchError
from helios.replicas.on_all_ranks import on_each, on_first
from helios.replicas.replicas import Replicas
from helios.start.checkpoint_search import SHARING, check_run_name, load_together, open_folder
from helios.start.options import Options
from helios.start.processes import Stored
from helios.start.run import Run
from helios.storage import files
from helios.storage.folder_lock import FolderLock


def require_writable(options: Options, save_name: str) -> None:
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
            f"{str(options.chkpt_root)!r}: {error}. Pass another one, or fix its permissions. "
            "Omit chkpt_root to train without checkpoints."
        ) from error


def _lock_folder(folder: RunFolder, run: Run) -> FolderLock:
    """Lock the folder of a run for this call, before anything in it is read; rank 0 holds the lock.

    A run that only loads creates no folder, but locks an existing one, because it also moves
    damaged files aside.

    Raises:
        FolderInUseError: in all processes, if another run holds it.
        CheckpointError: in all processes, if one of them does not see the folder for saving.
    """
    lock, can_save, team = FolderLock(folder.path), run.options.can_save, run.replicas
    run.settings.callback(lock.release)

    def take() -> str:
        if can_save or folder.path.is_dir():
            lock.acquire()
        return lock.owner

    owner = on_first(team, take)
    if can_save and owner:
        on_each(team, lambda: _require_sight(lock.path, owner, team))
    return lock


PATIENCE = 10.0
"""Seconds within which a network file system shows a new file to all machines."""


def _require_sight(path: Path, owner: str, team: Replicas) -> None:
    """Check that a process sees the folder that rank 0 has locked: it must resume from there."""
    deadline = time.monotonic() + PATIENCE
    while team.rank != 0:
        with contextlib.suppress(OSError):
            # A failed lookup is cached until the folder is opened.
            os.scandir(path.parent.parent).close()
            os.scandir(path.parent).close()
            if path.read_text() == owner:
                return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Rank 0 of {team.num_processes} saves to {path.parent}, but rank {team.rank} "
                f"does not see the same folder. {SHARING}"
            )
        time.sleep(0.1)


_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The place where a run starts.

    Attributes:
        folder: the run's folder; ``None`` without ``chkpt_root``.
        loaded: the checkpoint to continue from; ``None`` for a first start.
        path: the path of ``resume=<path>`` from which the run was started, if any.
        is_branch: whether this is the first start from that path, which is another run's.
        goes_back: whether that path is an older checkpoint of this run; what is newer is to be set
            aside before training continues.
        changes: changes that were allowed, in earlier starts of the run.
        lock: keeps a second run out of the folder during the call; rank 0 holds it.
    """

    folder: RunFolder | None = None
    loaded: Loaded | None = None
    path: str | None = None
    is_branch: bool = False
    goes_back: bool = False
    changes: tuple[str, ...] = ()
    lock: FolderLock | None = None

    @property
    def record(self) -> Record | None:
        """The content of the checkpoint, until it is released."""
        return None if self.loaded is None else self.loaded.record

    @property
    def iteration(self) -> int:
        """The iteration of the checkpoint; 0 for the beginning."""
        return 0 if self.record is None else self.record.place[1]

    def release_payload(self) -> None:
        """Release the checkpoint's content, once it is loaded: its tensors are copied by then."""
        if self.loaded is not None:
            self.loaded.payload.clear()

    def describe_rescue(self) -> str:
        """Return what an error leaves to the user before anything was trained."""
        if self.loaded is None:
            return ""
        return f"Nothing was trained; {self.loaded.path} is unchanged."


def _read_stored(path: Path, *, safe_types: list[Any]) -> Stored | None:
    """Read a checkpoint's sidecar, or its content if it has none; ``None`` if it is damaged.

    The content decides whether a run resumes, not the age of a file.
    """
    try:
        sidecar = loading.read_sidecar(path)
        if sidecar is not None:
            return Stored(sidecar.num_replicas, path, sidecar.resumed_from)
        record = loading.load_present(path, safe_types, maps=True).record
    except DamagedCheckpointError:
        # An older one says the same; loading the run reports the damage.
        return None
    return Stored(record.num_replicas, path, record.resumed_from)


def _search_stored(
    folder: RunFolder, safe_types: list[Any], listed: list[Path] | None
) -> Stored | None:
    """Return what the newest undamaged checkpoint says."""
    look = partial(_read_stored, safe_types=safe_types)
    return file_names.search(folder.path, look, listed=listed)


def find_stored(
    options: Options, save_name: str, safe_types: list[Any], *, is_fit: bool
) -> Stored | None:
    """Return what the run was started with; ``None`` for a new run.

    Args:
        options: where checkpoints are, and which one is resumed.
        save_name: name of the run's folder.
        safe_types: types that may be built.
        is_fit: whether ``resume`` applies; an evaluation uses the newest checkpoint.

    Raises:
        CheckpointError: if the newest checkpoint is undamaged, but cannot be used.
    """
    folder = open_folder(options, save_name)
    if folder is None or (is_fit and options.resume == "never"):
        return None
    # Any checkpoint of the run will do, so one listing is enough, unless it holds none: a training
    # in progress commits one and deletes an older one, and a listing may miss both.
    listed = file_names.list_checkpoints(folder.path) or None
    stored = _search_stored(folder, safe_types, listed)
    origin = options.resume_path if is_fit else None
    if origin is not None and (stored is None or stored.origin != str(origin.absolute())):
        return find_replicas(origin, safe_types)
    return stored if stored is not None and stored.num_replicas else None


def find_replicas(path: Path, safe_types: list[Any]) -> Stored | None:
    """Return what a file says of the number of replicas; ``None`` without a file, or if unknown."""
    stored = _read_stored(path, safe_types=safe_types) if file_names.is_present(path) else None
    return stored if stored is not None and stored.num_replicas else None


def find_origin(run: Run) -> Origin:
    """Find the checkpoint that ``resume`` selects, and lock the run's folder for the call.

    Rank 0 searches, and all processes load the same file.

    Raises:
        FolderInUseError: if another run writes to the folder.
        RunMismatchError: if the newest checkpoint belongs to a run of another name, or of another
            number of replicas.
        CheckpointError: if there is a checkpoint that cannot be used.
    """
    folder = open_folder(run.options, run.model.save_name)
    if folder is None:
        return Origin()
    lock = _lock_folder(folder, run)
    types, folder.share = run.model.types_for_safe_load(), run.share

    def choose() -> tuple[Loaded | None, Origin]:
        origin = _choose_origin(folder, run.options, run.name, types)
        _check_replicas(origin.loaded, run.replicas.num_replicas)
        return origin.loaded, replace(origin, loaded=None)

    def pass_over(path: Path, damage: str) -> None:
        if path.parent != folder.path or folder.share is None:
            # Rank 0 has verified all of it: nothing is wrong with the file.
            raise DamagedCheckpointError(damage)
        folder.pass_over(path, damage)

    loaded, origin = load_together(choose, types, run.replicas, run.share, pass_over=pass_over)
    return replace(origin, folder=folder, loaded=loaded, lock=lock)


def _check_replicas(loaded: Loaded | None, num_replicas: int) -> None:
    if loaded is not None and loaded.record.num_replicas not in (0, num_replicas):
        raise RunMismatchError(
            f"{loaded.path} was saved with {loaded.record.num_replicas} replicas, but newer "
            f"files of the run were saved with {num_replicas}. Move the files of one kind out of "
            "the folder."
        )


def _choose_origin(
    folder: RunFolder, options: Options, run_name: str, safe_types: list[Any]
) -> Origin:
    """Find the origin, and move or delete files as ``resume`` requires; runs in one process."""
    listed = folder.clean()
    if options.resume == "never":
        _move_aside(folder)
        return Origin()
    if options.resume_path is None:
        origin = Origin(loaded=folder.load_newest(safe_types, listed=listed))
    else:
        origin = _start_from_path(folder, options.resume_path, safe_types, listed)
        origin = replace(origin, goes_back=origin.goes_back and options.can_save)
    loaded = origin.loaded
    if loaded is not None:
        if not origin.is_branch:
            check_run_name(loaded, run_name, folder)
        changes, path = (), loaded.record.resumed_from
        if loaded.sidecar is not None:
            changes, path = tuple(loaded.sidecar.changes), loaded.sidecar.resumed_from
        origin = replace(origin, changes=changes, path=origin.path or path)
    if origin.path is not None:
        # The user's command names it: without it, the same command would fail.
        folder.protect(Path(origin.path))
    return origin


def _move_aside(folder: RunFolder) -> None:
    moved = folder.move_aside()
    if moved is not None:
        _LOGGER.warning("Moved the existing checkpoints of the run to %s.", moved)


def set_newer_aside(origin: Origin) -> None:
    """Move what is newer than the checkpoint that a run goes back to, before training continues."""
    if origin.goes_back and origin.folder is not None and origin.loaded is not None:
        moved = origin.folder.move_newer_aside(origin.iteration)
        if moved is not None:
            _LOGGER.warning(
                "The run goes back to %s. Moved newer checkpoints and a copy of the ledger to %s.",
                origin.loaded.path.name,
                moved,
            )


def _start_from_path(
    folder: RunFolder, path: Path, safe_types: list[Any], listed: list[Path]
) -> Origin:
    given = str(path.absolute())
    stored = _search_stored(folder, safe_types, listed)
    if stored is None or stored.origin == given:
        try:
            newest = folder.load_newest(safe_types, listed=listed)
            if newest is not None:
                return Origin(loaded=newest, path=given)
        except DamagedCheckpointError as error:
            # The file that they were started from is the next older one.
            if not file_names.is_present(path):
                raise
            _LOGGER.warning("%s The run starts again from %s.", error, path)
    if not file_names.is_present(path):
        raise CheckpointError(
            'Trainer(resume=...) must be "auto", "never" or a checkpoint file, but there is no '
            f"file at {path}. Fix the path, or omit resume to continue from the newest."
        )
    loaded = folder.load(path, safe_types)
    if path.resolve().parent == folder.path.resolve():
        return Origin(loaded=loaded, path=given, goes_back=True)
    _move_aside(folder)
    return Origin(loaded=loaded, path=given, is_branch=True)

"""The checkpoint that a training starts from, as ``Trainer(resume=...)`` asks for it.

A run's folder belongs to one run; ``run_identity`` says what makes it that run. It is looked at
twice. :func:`find_stored` asks for the number of replicas, which the number of processes depends
on: only these can take the lock, and until then another run may change what is there. So
:func:`find_start` searches under the lock, in one listing, and its :class:`Start` is all that the
call needs to know from then on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.store import Loaded, RunFolder
from helios.errors import CheckpointError, DamagedCheckpointError, RunMismatchError
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search.run_folder import SHARING, open_folder
from helios.startup.launching.on_all_ranks import on_each, on_first
from helios.startup.launching.process_plan import Stored
from helios.startup.options.checkpoint_options import CheckpointOptions
from helios.storage.folder_lock import FolderLock

_LOGGER = logging.getLogger(__name__)


@dataclass
class Start:
    """Where a training starts.

    Attributes:
        folder: the run's folder; ``None`` without ``chkpt_root``.
        loaded: the checkpoint to go on from; ``None`` for a first start.
        origin: the path of ``resume=<path>`` that the run goes back to, if any.
        is_branch: whether this is the first start from that path.
        changes: what was allowed to differ, in all starts of the run.
        is_shortened: whether this run is to be shorter than the one that wrote the checkpoint.
        lock: keeps a second run out of the folder while the call goes on; rank 0 holds it.
    """

    folder: RunFolder | None = None
    loaded: Loaded | None = None
    origin: str | None = None
    is_branch: bool = False
    changes: list[str] = field(default_factory=list)
    is_shortened: bool = False
    lock: FolderLock | None = None

    def forget_payload(self) -> None:
        """Let go of the checkpoint's content, once it is loaded."""
        if self.loaded is not None:
            self.loaded = replace(self.loaded, payload={})


def _read_stored(path: Path, *, safe_types: list[Any]) -> Stored | None:
    """Ask a checkpoint's sidecar, or its content if it has none; ``None`` if it is damaged.

    What is written there, and not the age of a file, tells whether a run goes on.
    """
    try:
        sidecar = loading.read_sidecar(path)
        if sidecar is not None:
            return Stored(sidecar.num_replicas, path, sidecar.resumed_from)
        record = loading.load_present(path, safe_types, maps=True).record
    except DamagedCheckpointError:
        # An older one says the same; who loads the run tells of it.
        return None
    return Stored(record.num_replicas, path, record.resumed_from)


def _search_stored(
    folder: RunFolder, safe_types: list[Any], listed: list[Path] | None
) -> Stored | None:
    """Ask the newest checkpoint that is not damaged."""
    look = partial(_read_stored, safe_types=safe_types)
    return file_names.search(folder.path, look, listed=listed)


def find_stored(
    options: CheckpointOptions, save_name: str, safe_types: list[Any], *, is_fit: bool
) -> Stored | None:
    """Return what the run was begun with; ``None`` for a run that begins now.

    Args:
        options: where checkpoints lie, and which one is resumed.
        save_name: names the folder of the run.
        safe_types: types that may be built.
        is_fit: whether the run goes on, as ``resume`` says; an evaluation takes what is newest.

    Raises:
        CheckpointError: if the newest checkpoint is whole, but cannot be used.
    """
    folder = open_folder(options, save_name)
    if folder is None or (is_fit and options.resume == "never"):
        return None
    # Any checkpoint of the run will do, so one listing is enough, unless it holds none: a training
    # that goes on there commits one and deletes an older one, and a listing may miss both.
    listed = file_names.list_checkpoints(folder.path) or None
    stored = _search_stored(folder, safe_types, listed)
    if is_fit and options.resume != "auto":
        origin: Path = options.resume
        if stored is None or stored.origin != str(origin.absolute()):
            is_there = origin.is_file()
            stored = _read_stored(origin, safe_types=safe_types) if is_there else None
    return stored if stored is not None and stored.num_replicas else None


def follow(
    folder: RunFolder, path: Path | None, safe_types: list[Any], team: Replicas
) -> Loaded | None:
    """Load the file that rank 0 has found.

    Raises:
        CheckpointError: if this process does not see it.
    """
    if path is None:
        return None
    if not path.is_file():
        raise CheckpointError(
            f"Rank 0 of {team.num_processes} goes on from {path}, but rank {team.rank} finds no "
            f"such file. {SHARING}"
        )
    return folder.load(path, safe_types)


def find_start(
    options: CheckpointOptions,
    save_name: str,
    safe_types: list[Any],
    *,
    run_name: str,
    replicas: Replicas,
) -> Start:
    """Find the checkpoint that ``resume`` asks for; rank 0 looks, and all load the same file.

    Args:
        options: where checkpoints lie, and which one is resumed.
        save_name: names the folder of the run.
        safe_types: types that may be built.
        run_name: that of the present run, which must be that of the folder's files.
        replicas: those of the run.

    Raises:
        RunMismatchError: if the newest checkpoint belongs to a run of another name, or of another
            number of replicas.
        CheckpointError: if a checkpoint is there that cannot be used.
    """
    folder = open_folder(options, save_name)
    if folder is None:
        return Start()
    own: list[Start] = []

    def look() -> tuple[str | None, Start]:
        start = _look(folder, options, run_name, safe_types)
        _check_replicas(start.loaded, replicas.num_replicas)
        own.append(start)
        name = None if start.loaded is None else start.loaded.path.name
        return name, replace(start, folder=None, loaded=None)

    def load_too() -> None:
        if own:
            return
        path = None if name is None else folder.path / name
        if path is not None and found.is_branch:
            path = options.resume
        own.append(replace(found, folder=folder, loaded=follow(folder, path, safe_types, replicas)))

    name, found = on_first(replicas, look)
    on_each(replicas, load_too)
    return own[0]


def _check_replicas(loaded: Loaded | None, num_replicas: int) -> None:
    if loaded is not None and loaded.record.num_replicas not in (0, num_replicas):
        raise RunMismatchError(
            f"{loaded.path} was saved with {loaded.record.num_replicas} replicas, but newer "
            f"files of the run say {num_replicas}. Move one of both kinds out of the folder."
        )


def _look(
    folder: RunFolder, options: CheckpointOptions, run_name: str, safe_types: list[Any]
) -> Start:
    """Find the start, and put the folder in order; one process may do so."""
    listed = folder.clean()
    if options.resume == "never":
        _move_aside(folder, keep=None)
        return Start(folder)
    if options.resume == "auto":
        start = Start(folder, folder.load_newest(safe_types, listed=listed))
    else:
        start = _start_from_path(folder, options.resume, safe_types, listed)
    if start.loaded is not None:
        _check_name(start.loaded, run_name, folder)
        _inherit(start, start.loaded)
    if start.origin is not None:
        # The user's command names it: without it, the same command would end in an error.
        folder.protect(Path(start.origin))
    return start


def _move_aside(folder: RunFolder, *, keep: Path | None) -> None:
    moved = folder.move_aside(f"{datetime.now():%Y-%m-%d_%H-%M-%S}", keep=keep)
    if moved is not None:
        _LOGGER.warning("Moved the present checkpoints of the run to %s.", moved)


def _start_from_path(
    folder: RunFolder, path: Path, safe_types: list[Any], listed: list[Path]
) -> Start:
    origin = str(path.absolute())
    stored = _search_stored(folder, safe_types, listed)
    if stored is None or stored.origin == origin:
        try:
            newest = folder.load_newest(safe_types, listed=listed)
            if newest is not None:
                return Start(folder, newest, origin)
        except DamagedCheckpointError as error:
            # The file that they came of is the next older one.
            if not path.is_file():
                raise
            _LOGGER.warning("%s Here the run goes back to %s.", error, path)
    if not path.is_file():
        raise CheckpointError(
            f'Trainer(resume=...) must be "auto", "never" or a checkpoint file, but there is no '
            f"file at {path}. Correct the path, or leave it out to go on from the newest."
        )
    loaded = folder.load(path, safe_types)
    _move_aside(folder, keep=path)
    return Start(folder, loaded, origin, is_branch=True)


def _check_name(loaded: Loaded, name: str, folder: RunFolder) -> None:
    sidecar = loaded.sidecar
    if sidecar is not None and not sidecar.is_migrated and sidecar.run_name != name:
        raise RunMismatchError(
            f"The folder {folder.path} belongs to the run {sidecar.run_name!r} (newest checkpoint "
            f"{loaded.path.name}), but this run is {name!r}. Give the model another save_name, "
            f"pass run_name={sidecar.run_name!r} to go on with that run, or resume='never' to "
            "move its files aside."
        )


def _inherit(start: Start, loaded: Loaded) -> None:
    sidecar = loaded.sidecar
    origin = loaded.record.resumed_from
    if sidecar is not None:
        start.changes, origin = list(sidecar.changes), sidecar.resumed_from
    start.origin = start.origin or origin

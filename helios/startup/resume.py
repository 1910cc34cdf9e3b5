"""Which run is it, and where does it go on (DESIGN section 6).

A run's folder belongs to one run. What defines the run is compared with what the checkpoint holds,
before the first step; a difference needs the user's allowance, which is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.record import Record
from helios.checkpoint.store import Loaded, RunFolder
from helios.engines.engine import Engine
from helios.errors import (
    CheckpointError,
    DamagedCheckpointError,
    RunMismatchError,
)
from helios.replicas.replicas import Replicas
from helios.schedule import find_limit, is_limit
from helios.startup.arguments import Arguments
from helios.startup.folder import SHARING, open_folder
from helios.startup.processes import Stored
from helios.startup.together import on_each, on_first
from helios.state import Cursor, TrainingState
from helios.storage.folder_lock import FolderLock

_LOGGER = logging.getLogger(__name__)

_RESTARTING = ("dataset", "length", "shuffle", "seed", "sampler", "random_seed", "is_distributed")


_UNCOUNTED = ("length", None)
"""What is stored of a loader whose samples nobody has counted."""

_OF_DATA = (
    *("dataset", "length", "batch_size", "shuffle", "drop_last", "seed", "sampler"),
    *("limit_batches", "is_distributed"),
)


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


@dataclass(frozen=True)
class _Word:
    """What a checkpoint says of its run: it, and not its age, tells whether a run goes on."""

    path: Path
    num_replicas: int
    origin: str | None


def _ask(path: Path, *, safe_types: list[Any]) -> _Word | None:
    """Ask a checkpoint's sidecar, or its content if it has none; ``None`` if it is damaged."""
    try:
        sidecar = loading.read_sidecar(path)
        if sidecar is not None:
            return _Word(path, sidecar.num_replicas, sidecar.resumed_from)
        record = loading.load_present(path, safe_types, maps=True).record
    except DamagedCheckpointError:
        # An older one says the same; who loads the run tells of it.
        return None
    return _Word(path, record.num_replicas, record.resumed_from)


def _find_word(folder: RunFolder, safe_types: list[Any]) -> _Word | None:
    """Ask the newest checkpoint that is not damaged."""
    return file_names.search(folder.path, partial(_ask, safe_types=safe_types))


def find_stored(
    arguments: Arguments, save_name: str, safe_types: list[Any], *, is_fit: bool
) -> Stored | None:
    """Return what the run was begun with; ``None`` for a run that begins now.

    Args:
        arguments: the options of the trainer.
        save_name: names the folder of the run.
        safe_types: types that may be built.
        is_fit: whether the run goes on, as ``resume`` says; an evaluation takes what is newest.

    Raises:
        CheckpointError: if the newest checkpoint is whole, but cannot be used.
    """
    folder = open_folder(arguments, save_name)
    if folder is None or (is_fit and arguments.resume == "never"):
        return None
    word = _find_word(folder, safe_types)
    if is_fit and arguments.resume != "auto":
        origin: Path = arguments.resume
        if word is None or word.origin != str(origin.absolute()):
            word = _ask(origin, safe_types=safe_types) if origin.is_file() else None
    # A migrated file does not say how many processes had trained.
    return Stored(word.num_replicas, word.path) if word is not None and word.num_replicas else None


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
    arguments: Arguments, save_name: str, safe_types: list[Any], *, replicas: Replicas
) -> Start:
    """Find the checkpoint that ``resume`` asks for; rank 0 looks, and all load the same file.

    Raises:
        RunMismatchError: if the newest checkpoint belongs to a run of another name, or of another
            number of replicas.
        CheckpointError: if a checkpoint is there that cannot be used.
    """
    folder = open_folder(arguments, save_name)
    if folder is None:
        return Start()
    own: list[Start] = []

    def look() -> tuple[str | None, Start]:
        start = _look(folder, arguments, save_name, safe_types)
        _check_replicas(start.loaded, replicas.num_replicas)
        own.append(start)
        name = None if start.loaded is None else start.loaded.path.name
        return name, replace(start, folder=None, loaded=None)

    def load_too() -> None:
        if own:
            return
        path = None if name is None else folder.path / name
        if path is not None and found.is_branch:
            path = arguments.resume
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


def _look(folder: RunFolder, arguments: Arguments, save_name: str, safe_types: list[Any]) -> Start:
    """Find the start, and put the folder in order; one process may do so."""
    folder.clean()
    if arguments.resume == "never":
        _move_aside(folder, keep=None)
        return Start(folder)
    if arguments.resume == "auto":
        start = Start(folder, folder.load_newest(safe_types))
    else:
        start = _start_from_path(folder, arguments.resume, safe_types)
    if start.loaded is not None:
        _check_name(start.loaded, arguments.run_name or save_name, folder)
        _inherit(start, start.loaded)
    if start.origin is not None:
        # The user's command names it: without it, the same command would end in an error.
        folder.protect(Path(start.origin))
    return start


def _move_aside(folder: RunFolder, *, keep: Path | None) -> None:
    moved = folder.move_aside(f"{datetime.now():%Y-%m-%d_%H-%M-%S}", keep=keep)
    if moved is not None:
        _LOGGER.warning("Moved the present checkpoints of the run to %s.", moved)


def _start_from_path(folder: RunFolder, path: Path, safe_types: list[Any]) -> Start:
    origin = str(path.absolute())
    word = _find_word(folder, safe_types)
    if word is None or word.origin == origin:
        try:
            newest = folder.load_newest(safe_types)
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


def identity(
    arguments: Arguments, description: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return what defines a run, in the names of ``allow_changes``."""
    return {name: description.get(name) for name in _OF_DATA} | {
        "random_seed": arguments.seed,
        "train_unit": arguments.unit.name.lower(),
        "accumulation_steps": arguments.accumulation_steps,
        "precision": engine.precision.value,
    }


def limits(arguments: Arguments) -> dict[str, float | None]:
    """Return the options that end a run; raising one lets a finished run go on."""
    return {
        "total_steps": arguments.total_steps,
        "early_stop_cycles": arguments.early_stop_cycles,
    }


def is_extended(arguments: Arguments, stored: Mapping[str, Any]) -> bool:
    """Whether this run is meant to be longer than the one that wrote the checkpoint."""
    return any(now > before for now, before in _pair_limits(arguments, stored))


def is_shortened(arguments: Arguments, stored: Mapping[str, Any]) -> bool:
    """Whether this run is meant to be shorter than the one that wrote the checkpoint."""
    return any(now < before for now, before in _pair_limits(arguments, stored))


def _pair_limits(arguments: Arguments, stored: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [(now, stored.get(name)) for name, now in limits(arguments).items()]
    infinite = float("inf")
    return [
        (infinite if now is None else now, infinite if before is None else before)
        for now, before in pairs
    ]


def is_still_finished(arguments: Arguments, record: Record, reason: str) -> bool:
    """Whether a run that was marked as finished has nothing left to train under these options.

    Args:
        arguments: the options of the trainer.
        record: the content of the marked checkpoint.
        reason: why the run came to its end there.
    """
    stored = record.options
    if stored.get("train_unit") != arguments.unit.name.lower():
        return False
    cursor = Cursor(**record.cursor)
    if is_limit(reason) and not cursor.stop_reason:
        # The mark may have been made under a smaller total than that of the checkpoint.
        state = TrainingState(**record.training_state)
        return bool(find_limit(arguments.schedule, state, cursor))
    return not is_extended(arguments, stored)


def note_limits(arguments: Arguments, stored: Mapping[str, Any]) -> list[str]:
    """Say which limits differ from the checkpoint's; returns them as text, to be recorded."""
    changes = [
        f"{name}: {stored[name]} -> {now}"
        for name, now in limits(arguments).items()
        if name in stored and stored[name] != now
    ]
    for text in changes:
        _LOGGER.info("Changed since the checkpoint: %s.", text)
    return changes


def note_fingerprint(description: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Warn of a data set that says of itself that it is another one; returns that as text.

    It is the user's own mark of the data, so what a difference means is the user's to judge.
    """
    before, now = stored.get("fingerprint"), description.get("fingerprint")
    if before is None or before == now:
        return []
    text = f"fingerprint: {before!r} -> {now!r}"
    _LOGGER.warning(
        "The training data set is not that of the checkpoint: it has another fingerprint (%s). The "
        "run continues with the new data, so its results differ from here on.",
        text,
    )
    return [text]


def report_finished(name: str, loaded: Loaded, reason: str, *, is_passed: bool) -> None:
    """Say that there is nothing to do, whose run it is, and what would change that.

    If the run has passed this total, as at the earlier stages of a script that is started again,
    that is no reason for a warning.
    """
    _LOGGER.log(
        logging.INFO if is_passed else logging.WARNING,
        "Nothing to do: the run %r in %s is finished (%s; %s). Raise total_steps or "
        "early_stop_cycles to go on with it, pass resume='never' to start it anew, or give another "
        "model a save_name of its own.",
        name,
        loaded.path.parent,
        reason,
        loaded.path.name,
    )


def reconcile(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    allowed: tuple[str, ...],
    *,
    state: TrainingState,
    cursor: Cursor,
) -> list[str]:
    """Compare what defines the run then and now; returns the changes, ``name: old -> new``.

    An allowed change of data set, length, shuffle, seed or sampler begins the epoch under way anew;
    with another batch size it goes on at the stored sample.

    Raises:
        RunMismatchError: for a change that was not allowed.
    """
    changed = {
        name: f"{name}: {stored[name]!r} -> {value!r}"
        for name, value in present.items()
        if name in stored and stored[name] != value and (name, stored[name]) != _UNCOUNTED
    }
    refused = [name for name in changed if name not in allowed]
    if refused:
        names = ", ".join(f'"{name}"' for name in refused)
        raise RunMismatchError(
            "The run cannot go on, because what defines it has changed since its checkpoint: "
            f"{'; '.join(changed[name] for name in refused)}. Set it back, or allow the change "
            f"with Trainer(allow_changes=({names},))."
        )
    if any(name in _RESTARTING for name in changed):
        cursor.restart_epoch()
        state.end_epoch()
    for text in changed.values():
        _LOGGER.warning("Changed since the checkpoint, as allowed: %s.", text)
    return list(changed.values())

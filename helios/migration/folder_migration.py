"""Migrates the files of a folder to the current format, in place and under the same names.

The new file is written next to the old one and replaces it in one step; its sidecar follows. After
a kill, there is the old file, or the new one without a sidecar, which is marked as migrated: a
start handles both correctly, and the next migration completes it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.sidecar import Sidecar
from helios.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FolderInUseError,
    IncompatibleCheckpointError,
    StateError,
)
from helios.migration import helios_ml
from helios.storage import codec, files
from helios.storage.container_checks import check_container
from helios.storage.files import digest_file
from helios.storage.folder_lock import FolderLock
from helios.version import __version__

BACKUP_FOLDER = "before-migration"
"""Subfolder for old files: no start looks for checkpoints there."""

_CHUNK_BYTES = 1 << 20
_ANY_MAY_WRITE = 0o222


class Result(Enum):
    """The result for a file."""

    MIGRATED = "migrated"
    PENDING = "to be migrated"
    COMPLETED = "completed"
    CURRENT = "already current"
    FOREIGN = "not ours"
    LINK = "link"
    UNFINISHED = "unfinished save"
    READ_ONLY = "read-only"
    IN_USE = "in use"
    DAMAGED = "damaged"
    REFUSED = "refused"
    FAILED = "failed"

    @property
    def is_failure(self) -> bool:
        """Whether there may be a checkpoint that no start can use yet."""
        return self in _FAILURES


_FAILURES = frozenset(
    (Result.READ_ONLY, Result.IN_USE, Result.DAMAGED, Result.REFUSED, Result.FAILED)
)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result for one file, and its reason.

    Attributes:
        path: the file.
        result: the result.
        reason: an explanation, if the result needs one.
        backup: the copy of the old file, if there is one.
    """

    path: Path
    result: Result
    reason: str = ""
    backup: Path | None = None

    def __str__(self) -> str:
        """Return the path, and what there is to say of it."""
        notes = [self.reason] if self.reason else []
        notes += [f"the old file is {self.backup}"] if self.backup is not None else []
        return f"{self.path}{': ' if notes else ''}{'; '.join(notes)}"


def migrate_checkpoints(
    root: Path,
    *,
    is_recursive: bool = True,
    is_dry: bool = False,
    backs_up: bool = True,
    watch: Callable[[Sequence[Path]], Iterable[Path]] = iter,
) -> list[Report]:
    """Migrate the files of a folder, or one file, to the current format.

    Args:
        root: the folder or the file.
        is_recursive: whether to migrate those in the folders below it, too.
        is_dry: whether to only report; nothing is written.
        backs_up: whether to keep each old file in :data:`BACKUP_FOLDER` beside it.
        watch: yields the files one by one, and may show the progress.

    Returns:
        The result for each file that may be a checkpoint, including failures.
    """
    paths = list(_find_candidates(root, is_recursive)) if root.is_dir() else [root]
    migration = _Migration(is_dry=is_dry, backs_up=backs_up)
    return [migration.migrate(path) for path in watch(paths)]


@dataclasses.dataclass(frozen=True)
class _Migration:
    is_dry: bool
    backs_up: bool

    def migrate(self, path: Path) -> Report:
        """Migrate one file to the current format; failures are in the report."""
        try:
            return self._migrate(path)
        except FolderInUseError as error:
            return Report(path, Result.IN_USE, str(error))
        except DamagedCheckpointError as error:
            is_named = file_names.parse(path) is not None
            return Report(path, Result.DAMAGED if is_named else Result.FOREIGN, str(error))
        except (IncompatibleCheckpointError, helios_ml.NotAsWrittenError) as error:
            return Report(path, Result.REFUSED, str(error))
        except (OSError, MemoryError, CheckpointError, StateError) as error:
            return Report(path, Result.FAILED, str(error) or type(error).__name__)

    def _migrate(self, path: Path) -> Report:
        if path.is_dir():
            next(path.iterdir(), None)
            if file_names.is_checkpoint(path):
                return Report(path, Result.CURRENT)
        if file_names.is_temporary(path):
            return Report(path, Result.UNFINISHED, "a save in progress, or one that was killed")
        if path.is_symlink() or not path.is_file():
            return Report(path, Result.LINK, "only files are migrated, in place")
        try:
            sidecar = _read_own_sidecar(path)
        except IncompatibleCheckpointError as error:
            return Report(path, Result.CURRENT, str(error))
        if sidecar is not None and sidecar.migrated_from is None:
            return Report(path, Result.CURRENT)
        return self._open(path, sidecar)

    def _open(self, path: Path, sidecar: Sidecar | None) -> Report:
        seen = _identify(path)
        with codec.hiding(helios_ml.NAMES) as types:
            tree, names = codec.read_structure(path)
        if helios_ml.find(tree, file_names.KEY_SCHEMA) is not None:
            origin = helios_ml.find(tree, file_names.KEY_MIGRATED_FROM)
            if sidecar is not None or origin is None:
                return Report(path, Result.CURRENT)
            complete = partial(self._complete, path, types)
            return self._change(path, seen, complete, reason="its sidecar is missing")
        unknown = [name for name in names if name not in helios_ml.NAMES]
        if unknown:
            raise IncompatibleCheckpointError(_describe_unknown(unknown))
        if not helios_ml.is_old(tree):
            return Report(path, Result.FOREIGN, "it is not a checkpoint of helios-ml")
        check_container(path)
        code = codec.encode(_convert(tree, path), where="", safe_types=types)
        return self._change(path, seen, partial(self._replace, path, code))

    def _change(
        self,
        path: Path,
        seen: tuple[int, int, int],
        change: Callable[[], Report],
        *,
        reason: str = "",
    ) -> Report:
        """Change what is there, if it may be, and is still what was read."""
        if not path.stat().st_mode & _ANY_MAY_WRITE:
            return Report(path, Result.READ_ONLY, "allow writing to it, and start again")
        place = file_names.sidecar_path(path)
        if os.path.lexists(place) and _read_own_sidecar(path) is None:
            return Report(path, Result.FAILED, f"{place} is in the place of its sidecar: move it")
        if self.is_dry:
            return Report(path, Result.PENDING, reason)
        with FolderLock(path.parent):
            if _identify(path) != seen:
                return Report(path, Result.FAILED, "it was changed in the meantime: start again")
            return change()

    def _complete(self, path: Path, types: list[Any]) -> Report:
        """Write the sidecar of a migrated file, after a kill between the two."""
        payload = loading.load(path, types).payload
        _write_sidecar(path, payload, digest_file(path), source="")
        return Report(path, Result.COMPLETED, "its sidecar was missing")

    def _replace(self, path: Path, code: dict[str, Any]) -> Report:
        source = digest_file(path)
        with files.replacing(path) as partial:
            digest = codec.write_file(partial, code, hashes=True)
            shutil.copymode(path, partial)
            backup = _back_up(path, source) if self.backs_up else None
            # A sidecar of an earlier migration does not describe the new file.
            files.unlink(file_names.sidecar_path(path), missing_ok=True)
        _write_sidecar(path, code, digest, source=source)
        return Report(path, Result.MIGRATED, backup=backup)


def _find_candidates(root: Path, is_recursive: bool) -> Iterator[Path]:
    """Yield what may be a checkpoint in a folder, by name, sorted; links are not followed."""
    closed: list[Path] = []
    walk = os.walk(root, onerror=lambda error: closed.append(Path(error.filename)))
    for folder, folders, names in walk:
        folders[:] = sorted(name for name in folders if name != BACKUP_FOLDER)
        sharded = [name for name in folders if file_names.is_folder(Path(name))]
        folders[:] = [name for name in folders if name not in sharded]
        for path in (Path(folder, name) for name in sorted((*names, *sharded))):
            if path.suffix in (file_names.SUFFIX, file_names.FOLDER_SUFFIX) or _is_cut_off(path):
                yield path
        if not is_recursive:
            break
    yield from closed


def _is_cut_off(path: Path) -> bool:
    # A temporary file beside such a checkpoint is the rest of a migration, and is written again.
    return file_names.is_temporary(path) and not path.with_suffix("").exists()


def _read_own_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint; ``None`` if there is none, or for other JSON files."""
    try:
        return loading.read_sidecar(path)
    except DamagedCheckpointError:
        return None


def _identify(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _convert(tree: Any, path: Path) -> dict[str, Any]:
    try:
        return helios_ml.convert(tree, stem=path.stem)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise helios_ml.NotAsWrittenError(f"no release has written this: {error!r}") from error


def _describe_unknown(names: list[str]) -> str:
    return (
        f"it refers to {', '.join(names)}, which no release of helios-ml has written, and none of "
        "it was built. If these are types of your own that you trust, add them with "
        "torch.serialization.add_safe_globals([...]), and call "
        "helios.chkpt_migrator.migrate_checkpoints_to_current_version(folder) in the same script"
    )


def _write_sidecar(path: Path, payload: Mapping[str, Any], digest: str, *, source: str) -> None:
    state = payload[file_names.KEY_TRAINING_STATE]
    sidecar = Sidecar(
        run_name=file_names.run_name(path.stem),
        num_replicas=0,
        epoch=state["global_epoch"],
        iteration=state["global_iteration"],
        digest=digest,
        version=__version__,
        migrated_from=payload[file_names.KEY_MIGRATED_FROM],
        source_digest=source,
    )
    files.write_text_durably(file_names.sidecar_path(path), sidecar.to_json())


def _back_up(path: Path, digest: str) -> Path:
    """Copy a file to the backup folder, durably; returns the copy, or an existing one."""
    folder = path.parent / BACKUP_FOLDER
    files.make_folder(folder)
    target, number = folder / path.name, 1
    while target.exists():
        if digest_file(target) == digest:
            return target
        number += 1
        target = folder / f"{path.stem}-{number}{path.suffix}"
    with files.replacing(target) as partial:
        with files.create(partial) as handle, path.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                files.write(handle, chunk)
            files.fsync(handle)
        shutil.copystat(path, partial)
    return target

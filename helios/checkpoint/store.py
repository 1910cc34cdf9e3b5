"""``RunFolder``: the folder of one run, and how checkpoints are committed to it.

A save writes everything under temporary names and commits with one rename: if the process dies
between any two file operations, the folder holds the checkpoints that were committed before, or
those and the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.loading import RECORD_NAME, Loaded, join_digests, load_checkpoint
from helios.checkpoint.retention import CheckpointStore, Entry, needs_sidecars, plan, with_sidecar
from helios.checkpoint.sidecar import Sidecar
from helios.core.sharded_tensors import RowShare
from helios.errors import DamagedCheckpointError, StateError
from helios.storage import codec, files
from helios.storage.files import FileFacts
from helios.storage.staging import HostBuffers
from helios.version import __version__

__all__ = ["CheckpointStore", "Entry", "Loaded", "RunFolder", "Sidecar", "load_checkpoint"]

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass
class PendingCheckpoint:
    """A checkpoint that is to be written.

    Attributes:
        path: its path.
        payload: its content, until it is encoded; of sharded tensors, it has references only.
        sidecar: facts about it; digest, schema and version are filled in when it is committed.
        safe_types: types that may be built when it is loaded.
        rows: the files that all processes have written, or the error of one, if it is sharded.
        code: the encoded payload.
    """

    path: Path
    payload: dict[str, Any]
    sidecar: Sidecar
    safe_types: Iterable[Any] = ()
    rows: dict[str, FileFacts] | Exception | None = None
    code: Any = None

    def encode(self, buffers: HostBuffers | None = None) -> None:
        """Encode the payload, in one call, so that aliases are kept; no file is touched.

        Args:
            buffers: copy all tensors into these, so that training may continue before the commit.

        Raises:
            StateError: for a value that could not be loaded again, or counters that disagree with
                its name or sidecar.
            MemoryError: if the copies do not fit.
        """
        # Hooks may have changed the counters, from which name and sidecar are made.
        if file_names.parse(self.path) is None:
            raise StateError(f"The checkpoint {self.path.name} must name its epoch and iteration.")
        try:
            loading.check_agreement(self.path.name, self.payload, self.sidecar)
        except DamagedCheckpointError as error:
            text = f"The checkpoint would be refused when it is loaded: {error}"
            raise StateError(text) from None
        types = list(self.safe_types)
        self.code = codec.encode(self.payload, where="", safe_types=types, buffers=buffers)
        self.payload = {}


class RunFolder:
    """The checkpoints of one run.

    Args:
        folder: ``chkpt_root/<save_name>``; created by the first save.
        options: how to write and keep checkpoints.

    Attributes:
        path: the folder.
        options: how checkpoints are written and kept.
        damaged: the damaged checkpoints that :meth:`load_newest` has passed over.
        share: what this process holds of sharded networks, as for
            :func:`helios.checkpoint.loading.load`.
    """

    def __init__(self, folder: Path, options: CheckpointStore | None = None) -> None:
        self.path = Path(folder)
        self.options = options or CheckpointStore()
        # A run saves often, and its sidecars do not change: each is read once.
        self._known: dict[Path, Entry] = {}
        self.damaged: list[Path] = []
        self.share: RowShare | None = None
        self._protected: set[Path] = set()
        self._passed_over: list[Path] = []

    def protect(self, path: Path) -> None:
        """Never delete this file: the run was resumed from it."""
        # As listings spell it, whichever path leads into the folder, also by a link to the file.
        for place in (path, path.resolve()):
            is_inside = place.parent.resolve() == self.path.resolve()
            self._protected.add(self.path / place.name if is_inside else place)

    def path_of(self, stem: str, *, is_sharded: bool = False) -> Path:
        """Return the path of a checkpoint by its name without suffix."""
        suffix = file_names.FOLDER_SUFFIX if is_sharded else file_names.SUFFIX
        return self.path / f"{stem}{suffix}"

    def commit(self, pending: PendingCheckpoint) -> Sidecar:
        """Write an encoded checkpoint, and delete what the retention rules allow.

        Returns:
            Its sidecar, as it is on the disk.

        Raises:
            OSError: if the disk fails; it names a file. The partial files are removed, older
                checkpoints stay.
        """
        try:
            files.make_folder(self.path)
            sidecar = self._write(pending)
            files.fsync_folder(self.path)
        except OSError as error:
            # The system does not name a file that is already open.
            if error.errno is not None:
                error.filename = error.filename or str(pending.path)
            raise
        self._apply_retention(pending.path, sidecar.run_name)
        return sidecar

    def _write(self, pending: PendingCheckpoint) -> Sidecar:
        path, unfinished = pending.path, files.temporary_path(pending.path)
        try:
            if pending.rows is None:
                digest = codec.write_file(unfinished, pending.code, hashes=self.options.digest)
                sidecar = _seal(pending.sidecar, digest)
            else:
                sidecar = self._complete_folder(unfinished, pending)
            files.write_text_durably(file_names.sidecar_path(path), sidecar.to_json())
            files.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                if not path.exists():
                    files.unlink(file_names.sidecar_path(path), missing_ok=True)
                _remove(unfinished)
            raise
        return sidecar

    def _complete_folder(self, draft: Path, pending: PendingCheckpoint) -> Sidecar:
        """Write the record beside the rows of all processes."""
        if isinstance(pending.rows, Exception):
            raise pending.rows
        assert pending.rows is not None
        record, hashes = draft / RECORD_NAME, self.options.digest
        digest = codec.write_file(record, pending.code, hashes=hashes)
        facts = {**pending.rows, RECORD_NAME: FileFacts(record.stat().st_size, digest)}
        for path in draft.iterdir():
            # An earlier save may have left files here, and a process without rows an empty one.
            if path.name not in facts:
                files.unlink(path)
        files.fsync_folder(draft)
        return _seal(pending.sidecar, join_digests(facts) if hashes else "", facts)

    def _apply_retention(self, written: Path, run_name: str) -> None:
        if self.options.keeps_all:
            return
        try:
            # No other process changes the folder meanwhile: the run holds its lock.
            present = file_names.list_checkpoints(self.path)
            own = [Entry(path) for path in present if file_names.belongs_to(path, run_name)]
            if needs_sidecars(self.options):
                own = [self._known.get(entry.path) or with_sidecar(entry.path) for entry in own]
                self._known = {entry.path: entry for entry in own if entry.is_known}
            doomed = plan(own, self.options, self._protected | {written})
        except OSError as error:
            _LOGGER.warning("Old checkpoints in %s were not deleted: %s.", self.path, error)
            return
        for entry in doomed:
            try:
                self._delete(entry.path)
            except OSError as error:
                _LOGGER.warning("The old checkpoint %s was not deleted: %s.", entry.path, error)

    def _delete(self, path: Path) -> None:
        # Delete the checkpoint first: without its sidecar, it would be loaded unverified.
        doomed = path
        if file_names.is_folder(doomed):
            # A kill leaves it complete, or as a draft.
            doomed = files.temporary_path(doomed)
            files.remove_folder(doomed)
            with contextlib.suppress(FileNotFoundError):
                files.replace(path, doomed)
        _remove(doomed)
        files.unlink(file_names.sidecar_path(path), missing_ok=True)

    def find(self, epoch: int, iteration: int) -> Path | None:
        """Return the committed checkpoint of this (epoch, iteration); ``None`` without one."""
        found = file_names.list_checkpoints(self.path)
        return next((path for path in found if file_names.parse(path) == (epoch, iteration)), None)

    def mark_finished(self, path: Path, reason: str) -> None:
        """Record in a checkpoint's sidecar why the run ended there.

        Raises:
            DamagedCheckpointError: if the sidecar is damaged.
        """
        sidecar = loading.read_sidecar(path)
        if sidecar is None:
            _LOGGER.warning(
                "%s has no sidecar; the end of the run is not recorded (%s).", path, reason
            )
            return
        finished = dataclasses.replace(sidecar, finished=reason)
        files.write_text_durably(file_names.sidecar_path(path), finished.to_json())

    def load(self, path: Path, safe_types: Iterable[Any] = ()) -> Loaded:
        """Verify and read one checkpoint, whose tensors may be mapped from the file.

        See :func:`helios.checkpoint.loading.load`; copy what you keep.
        """
        loaded = loading.load(path, safe_types, maps=True, share=self.share)
        self.protect(loaded.path)
        return loaded

    def load_newest(
        self,
        safe_types: Iterable[Any] = (),
        *,
        renames_damaged: bool = True,
        listed: list[Path] | None = None,
    ) -> Loaded | None:
        """Read the newest undamaged checkpoint.

        Args:
            safe_types: types that may be built.
            renames_damaged: rename damaged files; only for the process that writes to the folder.
            listed: the checkpoints, as :meth:`clean` has returned them; ``None`` to list them.

        Returns:
            The checkpoint, which is never deleted from then on; ``None`` if there is none. Its
            tensors may be mapped from the file: copy what you keep.

        Raises:
            DamagedCheckpointError: if all checkpoints are damaged, now or at an earlier start.
            CheckpointError: if the newest one is undamaged, but cannot be used here.
        """
        types = list(safe_types)
        self.damaged = list(self._passed_over)

        def look(path: Path) -> Loaded | None:
            if path in self._passed_over:
                return None
            try:
                return loading.load_present(path, types, maps=True, share=self.share)
            except DamagedCheckpointError as error:
                if path not in self.damaged:
                    self.damaged.append(path)
                    _LOGGER.warning("%s Continuing with the next older checkpoint.", error)
                if renames_damaged:
                    self.rename_damaged(path)
                return None

        loaded = file_names.search(self.path, look, listed=listed)
        if loaded is None:
            self._refuse_silent_restart(self.damaged + find_damaged(self.path))
            return None
        self.protect(loaded.path)
        return loaded

    def _refuse_silent_restart(self, damaged: list[Path]) -> None:
        names = sorted(
            path.name
            for path in {*damaged}
            if file_names.is_checkpoint(path) or file_names.is_damaged_checkpoint(path)
        )
        if names:
            raise DamagedCheckpointError(
                f"All checkpoints in {self.path} are damaged: {', '.join(names)}. To start a new "
                'run, pass resume="never", which moves them aside, or move them away yourself.'
            )

    def pass_over(self, path: Path, reason: str, *, renames: bool = True) -> None:
        """Do not load a checkpoint of which another process has found its part damaged.

        Args:
            path: the checkpoint.
            reason: what that process says.
            renames: as ``renames_damaged`` of :meth:`load_newest`.
        """
        self._passed_over.append(path)
        _LOGGER.warning("%s Continuing with the next older checkpoint.", reason)
        if renames:
            self.rename_damaged(path)

    def rename_damaged(self, path: Path) -> Path:
        """Rename a damaged checkpoint and its sidecar to names that are never loaded."""
        target = file_names.damaged_path(path)
        _LOGGER.warning("Renaming the damaged checkpoint %s to %s.", path, target.name)
        # Rename the checkpoint first: without its sidecar, it would be loaded unverified.
        files.replace(path, target)
        sidecar = file_names.sidecar_path(path)
        if sidecar.exists():
            files.replace(sidecar, file_names.damaged_path(sidecar))
        files.fsync_folder(self.path)
        return target

    def clean(self) -> list[Path]:
        """Remove partial files of a killed save; other files are not touched.

        Returns:
            The committed checkpoints of the same listing, oldest first.
        """
        present = file_names.list_files(self.path)
        for path in present:
            if not file_names.is_temporary(path) and not _is_orphan(path):
                continue
            try:
                _remove(path)
            except OSError as error:
                _LOGGER.warning(
                    "The partial file of a killed save, %s, could not be removed: %s. It does no "
                    "harm; delete it when you can.",
                    path,
                    error,
                )
        return file_names.select_checkpoints(present)

    def move_aside(self) -> Path | None:
        """Move all checkpoints, damaged files and evidence to ``before-<date>/``.

        Returns:
            The new folder, or ``None`` if there was nothing to move.
        """
        moved = _with_sidecars(file_names.list_checkpoints(self.path)) + find_damaged(self.path)
        if not moved:
            return None
        moved += [path for each in _EVIDENCE for path in sorted(self.path.glob(each))]
        return _move_to_new_folder(self.path, moved)

    def move_newer_aside(self, iteration: int) -> Path | None:
        """Move checkpoints after an iteration, and copy the ledger, to ``before-<date>/``.

        Returns:
            The new folder, or ``None`` if there was nothing to move.
        """
        present = file_names.list_checkpoints(self.path)
        # The newest first: after a kill, what is left is still one run.
        newer = [path for path in reversed(present) if file_names.iteration_of(path) > iteration]
        if not newer:
            return None
        copied = self.path.glob("ledger.jsonl")
        return _move_to_new_folder(self.path, _with_sidecars(newer), copied)


def _remove(path: Path) -> None:
    """Remove a file or folder, judged by its name; does nothing if there is none."""
    if file_names.is_folder(path):
        files.remove_folder(path)
    else:
        files.unlink(path, missing_ok=True)


def _seal(sidecar: Sidecar, digest: str, facts: dict[str, FileFacts] | None = None) -> Sidecar:
    """Return the sidecar of what is on the disk now."""
    return dataclasses.replace(
        sidecar, digest=digest, schema=file_names.SCHEMA, version=__version__, files=facts or {}
    )


def _is_orphan(path: Path) -> bool:
    is_named_so = path.suffix == file_names.SIDECAR_SUFFIX and file_names.parse(path) is not None
    suffixes = (file_names.SUFFIX, file_names.FOLDER_SUFFIX)
    if not is_named_so or any(path.with_suffix(suffix).exists() for suffix in suffixes):
        return False
    # A user's own JSON file may have such a name: only sidecars are removed.
    sidecar = loading.try_sidecar(path)
    if sidecar is None:
        return False
    return not sidecar.names_run or (sidecar.epoch, sidecar.iteration) == file_names.parse(path)


# What a run records of itself, also of earlier starts.
_EVIDENCE = (
    *("ledger*.jsonl", "run.jsonl", "stacks-rank-*.txt"),
    *(file_names.CONFIG_NAME, "config-*.yaml"),
)


def _with_sidecars(checkpoints: Iterable[Path]) -> list[Path]:
    # The sidecar first: on its own, the next start would take it for the rest of a killed save.
    pairs = [(file_names.sidecar_path(path), path) for path in checkpoints]
    return [path for pair in pairs for path in pair if path.exists()]


def _move_to_new_folder(folder: Path, moved: Iterable[Path], copied: Iterable[Path] = ()) -> Path:
    first = f"before-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    target = files.find_free(lambda n: folder / (first if n == 1 else f"{first}-{n}"))
    files.make_folder(target)
    for path in copied:
        files.copy_durably(path, target / path.name)
    for path in moved:
        files.replace(path, target / path.name)
    files.fsync_folder(target)
    files.fsync_folder(folder)
    return target


def find_damaged(folder: Path) -> list[Path]:
    """Return what was renamed as damaged in a folder; nothing if there is no folder."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if file_names.is_damaged(path)]

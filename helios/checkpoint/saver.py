"""Writes checkpoints, now or in a thread, and handles failures.

At the safe point the state is copied; a thread writes the copy while training continues. Only one
save is in progress: the next one waits for it. The thread does not communicate with other
processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from helios.checkpoint import file_names
from helios.checkpoint.sharded_commit import RankParts
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import Draft, RunFolder
from helios.checkpoint.writer_thread import WriterThread
from helios.errors import SaveError
from helios.storage.staging import HostBuffers

_LOGGER = logging.getLogger(__name__)


class SaveWatcher(Protocol):
    """What follows the saves of a run, in the thread that writes them."""

    def before_commit(self) -> None:
        """Write what a checkpoint relies on; an ``OSError`` makes the save fail."""

    def after_commit(self, path: Path) -> None:
        """Note that a checkpoint was committed."""

    def after_failure(self, path: Path, error: Exception) -> None:
        """Note that a checkpoint could not be saved."""


class Saver:
    """Saves the checkpoints of one run, in the process that writes.

    Args:
        folder: the run's folder, with its options.
        pins: whether the state is on CUDA devices.
        watcher: called at each save, in the thread that writes it; ``None`` without one.

    Attributes:
        newest: the newest committed checkpoint; ``None`` before there is one.
        failure: the error of a save that must end the training; otherwise ``None``.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        pins: bool = False,
        watcher: SaveWatcher | None = None,
    ) -> None:
        self.newest: Path | None = None
        self.failure: Exception | None = None
        self._folder = folder
        self._watcher = watcher
        self._buffers = HostBuffers(pins=pins) if folder.options.is_async else None
        self._thread = WriterThread("helios-checkpoint")
        self._in_flight: tuple[int, int] | None = None
        self._refused: tuple[Path, OSError] | None = None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Allocate memory for a state of tensors of these sizes, in bytes."""
        if self._buffers is None:
            return
        try:
            self._buffers.prepare(sizes)
        except MemoryError as error:
            self._do_without_copies(error)

    def save(
        self,
        payload: dict[str, Any],
        *,
        stem: str,
        sidecar: Sidecar,
        safe_types: Iterable[Any] = (),
    ) -> Path:
        """Save a checkpoint; returns its file, which another thread may still be writing.

        Args:
            payload: the content; may change after this returns.
            stem: name of the file without suffix.
            sidecar: facts about it.
            safe_types: types that may be built when the file is loaded.

        Raises:
            StateError: for a value that could not be loaded again.
            Exception: the failure of this save, or of the one before.
        """
        committed = self.begin(stem)
        if committed is not None:
            return committed
        draft = self.draft(payload, stem=stem, sidecar=sidecar, safe_types=safe_types)
        self.write(draft, is_now=not draft.is_own)
        return draft.path

    def begin(self, stem: str) -> Path | None:
        """Wait for the save before; returns the checkpoint of this name if it is committed already.

        Raises:
            Exception: the failure of an earlier save.
        """
        self.wait()
        self.raise_failure()
        place = file_names.parse(stem) or (0, 0)
        committed = self._find(place)
        if committed is not None:
            self.newest = committed
        return committed

    def draft(
        self,
        payload: dict[str, Any],
        *,
        stem: str,
        sidecar: Sidecar,
        safe_types: Iterable[Any] = (),
        parts: RankParts | None = None,
    ) -> Draft:
        """Encode a payload, and copy it if memory allows; see :meth:`RunFolder.draft`.

        Raises:
            StateError: for a value that could not be loaded again.
        """
        draft_it = partial(
            self._folder.draft,
            payload,
            stem=stem,
            sidecar=sidecar,
            safe_types=list(safe_types),
            parts=parts,
        )
        try:
            return draft_it(buffers=self._buffers)
        except MemoryError as error:
            self._do_without_copies(error)
            return draft_it()

    def write(self, draft: Draft, *, is_now: bool) -> None:
        """Write and commit a draft, in a thread or before this returns.

        Raises:
            Exception: the failure of this save, if it is written now and must end the training.
        """
        if is_now:
            self._write(draft)
            self.raise_failure()
            return
        self._in_flight = file_names.parse(draft.path)
        self._thread.start(lambda: self._write(draft))

    def _do_without_copies(self, error: MemoryError) -> None:
        self._buffers = None
        _LOGGER.warning(
            "There is too little memory for a copy of the state (%s), so training waits from now "
            "on until each checkpoint is on the disk, as with "
            "CheckpointStore(is_async=False).",
            error,
        )

    def _write(self, draft: Draft) -> None:
        try:
            if self._watcher is not None:
                self._watcher.before_commit()
            self.newest = self._folder.commit(draft)
            self._refused = None
            if self._watcher is not None:
                self._watcher.after_commit(self.newest)
        except OSError as error:
            if self._folder.options.on_save_error == "raise":
                self._condemn(draft.path, error)
            else:
                self._tolerate(draft.path, error)
        except Exception as error:
            self._condemn(draft.path, error)
        finally:
            self._in_flight = None

    def _tolerate(self, path: Path, error: OSError) -> None:
        self._refused = (path, error)
        self._note_failure(path, error)
        _LOGGER.error(
            "The checkpoint %s %s: %s. Older checkpoints are unchanged (newest: %s), and training "
            "continues; the next due save tries again. Meanwhile, check the disk (space, quota, "
            "permissions).",
            path,
            self._describe_fate(path),
            _name_cause(path, error),
            "none" if self.newest is None else self.newest.name,
        )

    def _describe_fate(self, path: Path) -> str:
        if self._find(file_names.parse(path) or (0, 0)) is None:
            return "was NOT saved"
        # The name exists, but the disk has not confirmed that it is durable.
        return "was written, but the disk did not confirm it, and a power cut may lose it"

    def _condemn(self, path: Path, error: Exception) -> None:
        self.failure = error
        self._note_failure(path, error)
        # If another error ends the training first, this one would go unnoticed.
        _LOGGER.error(
            "The checkpoint %s was NOT saved (%s: %s). Training ends with this error at its next "
            "safe point; older checkpoints are unchanged.",
            path,
            type(error).__name__,
            error,
        )

    def _note_failure(self, path: Path, error: Exception) -> None:
        if self._watcher is not None:
            self._watcher.after_failure(path, error)

    def has(self, epoch: int, iteration: int) -> bool:
        """Whether a checkpoint of this (epoch, iteration) is committed or in progress."""
        is_on_its_way = self._in_flight == (epoch, iteration)
        return is_on_its_way or self._find((epoch, iteration)) is not None

    def _find(self, place: tuple[int, int]) -> Path | None:
        try:
            return self._folder.find(*place)
        except OSError:
            # A folder that cannot be listed is no reason to fail here: the save will report it.
            return None

    def wait(self) -> None:
        """Wait until no save is in progress."""
        self._thread.wait()

    def raise_failure(self) -> None:
        """Raise the error that must end the training, if there is one."""
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """Wait for the save in progress.

        Raises:
            SaveError: if the disk refused the last checkpoint (an ``OSError``).
            Exception: any other failure of a save.
        """
        self.wait()
        self.raise_failure()
        if self._refused is not None:
            path, error = self._refused
            raise SaveError(
                f"The last checkpoint, {path}, {self._describe_fate(path)}: "
                f"{_name_cause(path, error)}. The newest safe one is "
                f"{'none' if self.newest is None else self.newest.name}. Make room or correct the "
                "permissions, and run the same command again: it repeats what is missing, with the "
                "same bits."
            ) from error

    def close(self) -> None:
        """Wait for the save in progress, and release the memory."""
        try:
            self._thread.close()
        finally:
            if self._buffers is not None:
                self._buffers.release()


def _name_cause(path: Path, error: OSError) -> str:
    """Return what the system has said, without a path that the message has already."""
    is_known = error.filename is not None and str(error.filename) == str(path)
    return str(error.strerror) if is_known and error.strerror else str(error)

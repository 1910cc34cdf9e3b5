"""Writes checkpoints, now or in a thread, and handles failures.

At the safe point the state is copied; a thread writes the copy while training continues. Only one
save is in progress: the next one waits for it. The thread does not communicate with other
processes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from helios.checkpoint import file_names
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import Draft, RunFolder
from helios.errors import SaveError
from helios.protocols import Meter
from helios.storage.staging import HostBuffers

_LOGGER = logging.getLogger(__name__)
_START_SECONDS = 1.0


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
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_idle = threading.Event()
        self._is_idle.set()
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
        meters: Mapping[int, Meter] | None = None,
    ) -> Path:
        """Save a checkpoint; returns its file, which another thread may still be writing.

        Args:
            payload: the content; may change after this returns.
            stem: name of the file without suffix.
            sidecar: facts about it.
            safe_types: types that may be built when the file is loaded.
            meters: measure how long values in the payload take to encode, by address.

        Raises:
            StateError: for a value that could not be loaded again.
            Exception: the failure of this save, or of the one before.
        """
        self.wait()
        self.raise_failure()
        place = file_names.parse(stem) or (0, 0)
        committed = self._find(place)
        if committed is not None:
            self.newest = committed
            return committed
        draft_it = partial(
            self._folder.draft,
            payload,
            stem=stem,
            sidecar=sidecar,
            safe_types=list(safe_types),
            meters=meters,
        )
        try:
            draft = draft_it(buffers=self._buffers)
        except MemoryError as error:
            self._do_without_copies(error)
            draft = draft_it()
        if draft.is_own:
            self._start(draft, place)
        else:
            self._write(draft)
            self.raise_failure()
        return draft.path

    def _start(self, draft: Draft, place: tuple[int, int]) -> None:
        has_begun = threading.Event()

        def work() -> None:
            has_begun.set()
            self._write(draft)

        self._in_flight = place
        self._is_idle.clear()
        self._thread = threading.Thread(target=work, name="helios-checkpoint")
        try:
            self._thread.start()
        except BaseException:
            # An interruption leaves it unknown whether the thread was started.
            if not has_begun.wait(_START_SECONDS):
                self._thread = None
                self._is_idle.set()
            raise

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
            self._is_idle.set()

    def _tolerate(self, path: Path, error: OSError) -> None:
        self._refused = (path, error)
        self._note_failure(path, error)
        _LOGGER.error(
            "The checkpoint %s %s: %s. Older checkpoints are unchanged (newest: %s), and training "
            "continues; the next due save tries again. Meanwhile, check the disk (space, quota, "
            "permissions).",
            path,
            self._describe_fate(path),
            error,
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
        if os.getpid() != self._pid:
            # A forked process has no such thread, and would wait forever.
            self._thread = None
            return
        # Before Python 3.13, an interrupted join takes the thread for ended.
        self._is_idle.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

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
                f"The last checkpoint, {path}, {self._describe_fate(path)}: {error}. The newest "
                f"safe one is {'none' if self.newest is None else self.newest.name}. Make room or "
                "correct the permissions, and run the same command again: it repeats what is "
                "missing, with the same bits."
            ) from error

    def close(self) -> None:
        """Wait for the save in progress, and release the memory.

        An interruption does not shorten the wait: the thread must stop writing to the folder before
        another run may use it.
        """
        interruption: KeyboardInterrupt | None = None
        has_waited = False
        while not has_waited:
            try:
                self.wait()
                has_waited = True
            except KeyboardInterrupt as error:
                interruption = error
        if self._buffers is not None:
            self._buffers.release()
        if interruption is not None:
            raise interruption

"""When a checkpoint is written, and what follows when that fails.

At the safe point the state is copied into memory of its own; a thread writes the copy while the
training goes on. One save is in flight: the next one waits for it. Nothing in the thread talks to
another process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import Draft, RunFolder
from helios.errors import SaveError
from helios.protocols import Meter
from helios.storage.staging import HostBuffers

_LOGGER = logging.getLogger(__name__)
_START_SECONDS = 1.0


class Saver:
    """Saves the checkpoints of one run, in its one process that writes.

    Args:
        folder: where they go; its options say how.
        pins: whether the state lies on CUDA devices.

    Attributes:
        newest: the newest checkpoint that is committed; ``None`` before there is one.
        failure: the error of a save that must end the training; ``None`` while there is none.
    """

    def __init__(self, folder: RunFolder, *, pins: bool = False) -> None:
        self.newest: Path | None = None
        self.failure: Exception | None = None
        self._folder = folder
        self._buffers = HostBuffers(pins=pins) if folder.options.is_async else None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._in_flight: tuple[int, int] | None = None
        self._refused: tuple[Path, OSError] | None = None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Make memory ready for a state of tensors of these sizes, in bytes."""
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
        """Save a checkpoint; returns its file, which another thread may still have to write.

        Args:
            payload: the content; may change when this returns.
            stem: name of the file without suffix.
            sidecar: what is known of it.
            safe_types: types that may be built when the file is loaded.
            meters: count how long values in the payload take to be encoded, by address.

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
            # An interruption leaves open whether it was started.
            if not has_begun.wait(_START_SECONDS):
                self._thread = None
                self._is_idle.set()
            raise

    def _do_without_copies(self, error: MemoryError) -> None:
        self._buffers = None
        _LOGGER.warning(
            "There is too little memory for a copy of the state (%s), so the training waits "
            "from now on until each checkpoint is on the disk, as with "
            "CheckpointStore(is_async=False).",
            error,
        )

    def _write(self, draft: Draft) -> None:
        try:
            self.newest = self._folder.commit(draft)
            self._refused = None
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
        _LOGGER.error(
            "The checkpoint %s %s: %s. Older checkpoints are as they were (newest: %s), and the "
            "training goes on; the next due save tries again. Look at the disk (space, quota, "
            "permissions) meanwhile.",
            path,
            self._describe_fate(path),
            error,
            "none" if self.newest is None else self.newest.name,
        )

    def _describe_fate(self, path: Path) -> str:
        if self._find(file_names.parse(path) or (0, 0)) is None:
            return "was NOT saved"
        # Its name is there, and the disk has failed to say that it will stay.
        return "was written, but the disk did not confirm it, and a power cut may lose it"

    def _condemn(self, path: Path, error: Exception) -> None:
        self.failure = error
        # Where another error ends the training first, nobody would learn of this one.
        _LOGGER.error(
            "The checkpoint %s was NOT saved (%s: %s). The training ends with this error at its "
            "next safe point; older checkpoints are as they were.",
            path,
            type(error).__name__,
            error,
        )

    def has(self, epoch: int, iteration: int) -> bool:
        """Whether a checkpoint of this (epoch, iteration) is committed, or on its way."""
        is_on_its_way = self._in_flight == (epoch, iteration)
        return is_on_its_way or self._find((epoch, iteration)) is not None

    def _find(self, place: tuple[int, int]) -> Path | None:
        try:
            return self._folder.find(*place)
        except OSError:
            # A folder that cannot even be listed is no reason to end here: the save will tell.
            return None

    def wait(self) -> None:
        """Return when no save is in flight."""
        if os.getpid() != self._pid:
            # A forked process has no such thread, and would wait for ever.
            self._thread = None
            return
        # A join that an interruption has cut off takes the thread for ended, before Python 3.13.
        self._is_idle.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_failure(self) -> None:
        """Raise the error that must end the training, if there is one."""
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """Wait for the save in flight.

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
        """Wait for the save in flight, and give the memory back.

        An interruption does not cut the wait short: what writes into the folder must end before
        another run may have it.
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

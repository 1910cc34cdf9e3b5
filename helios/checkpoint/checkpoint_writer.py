"""Writes the checkpoints of a run, now or in a thread, and handles failures.

At the safe point the state is copied; a thread writes the copy while training continues. Only one
save is in progress: the next one waits for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from helios.checkpoint import file_names
from helios.checkpoint.store import PendingCheckpoint, RunFolder
from helios.core.sharded_tensors import OwnRows
from helios.counters import TrainingState
from helios.distributed.process_groups import has_failed, saving_group
from helios.errors import SaveError, UsageError
from helios.listeners import RunListener
from helios.replicas.replicas import Replicas
from helios.storage import files
from helios.storage.dcp_folder import copy_rows, save_rows, split_sharded
from helios.storage.files import FileFacts
from helios.storage.staging import WriterThread

_LOGGER = logging.getLogger(__name__)

Describe: TypeAlias = Callable[[dict[str, Any]], PendingCheckpoint]
"""Completes a payload on rank 0 after its hooks, and returns where and how to write it."""


class CheckpointWriter:
    """The saves of a run that writes nothing, as in a replay, and the base of other writers.

    All processes must call each method together, unless it says otherwise.

    Args:
        newest: the checkpoint that the run starts from; ``None`` without one.
        place: (epoch, iteration) of its safe point.

    Attributes:
        newest: the newest checkpoint that was begun; on rank 0, of those that are committed.
        failure: the error of a save of this process that must end the run, or ``None``.
    """

    def __init__(self, newest: Path | None = None, place: tuple[int, int] | None = None) -> None:
        self.newest = newest
        self.failure: Exception | None = None
        self._announced = place

    def save(self, payload: dict[str, Any]) -> Path | None:
        """Save a payload as a checkpoint; all processes wait until it is copied.

        Args:
            payload: the content; may change after this returns.

        Returns:
            Its path, which another thread may still be writing to.

        Raises:
            StateError: for a value that could not be loaded again.
            UsageError: after a collective has failed: the processes may be at different points.
            Exception: on all processes, the failure of this save, or of the one before.
        """
        state = payload["training_state"]
        self._announced = state["global_epoch"], state["global_iteration"]
        return None

    def has(self, state: TrainingState) -> bool:
        """Return whether rank 0 has a checkpoint of this iteration, committed or in progress."""
        return self._announced == (state.global_epoch, state.global_iteration)

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the run, in all processes."""

    def wait(self) -> Path | None:
        """Wait until this process writes nothing; returns the newest checkpoint."""
        return self.newest

    def finish(self, conclude: Callable[[Path | None], None]) -> None:
        """Wait until all checkpoints are on the disk.

        Args:
            conclude: called on rank 0 afterwards, with the newest one.

        Raises:
            SaveError: in all processes, if the disk refused the last checkpoint.
            Exception: any other failure of a save.
        """

    def close(self) -> None:
        """Wait for the save in progress, also after an error, and release the memory."""


class PlainWriter(CheckpointWriter):
    """Saves checkpoints of unsharded models: rank 0 writes them.

    Args:
        folder: the run's folder, with its options.
        describe: completes what is to be written, on rank 0.
        replicas: the processes.
        pins: whether the state is on CUDA devices.
        listeners: called at each save, in the thread that writes it.
        newest: the checkpoint that the run starts from; ``None`` without one.
    """

    def __init__(
        self,
        folder: RunFolder,
        describe: Describe,
        *,
        replicas: Replicas | None = None,
        pins: bool = False,
        listeners: Sequence[RunListener] = (),
        newest: Path | None = None,
    ) -> None:
        super().__init__(newest)
        self._folder = folder
        self._describe = describe
        self._replicas = replicas or Replicas()
        self._listeners = listeners
        self._thread = WriterThread(
            "helios-checkpoint", content="the state", copies=folder.options.is_async, pins=pins
        )
        self._in_flight: tuple[int, int] | None = None
        self._refused: tuple[Path, OSError] | None = None

    @property
    def _newest_name(self) -> str:
        return "none" if self.newest is None else self.newest.name

    def save(self, payload: dict[str, Any]) -> Path:
        """Save a payload; see the base."""
        if has_failed():
            raise UsageError(
                "No checkpoint can be saved after a collective has failed, because the processes "
                "may be at different points. Let the error end this process, and start the run "
                "again: it resumes from the newest checkpoint."
            )
        path = self._save(payload)
        if self._replicas.rank != 0:
            self.newest = path
        return path

    def _save(self, payload: dict[str, Any]) -> Path:
        def write() -> Path:
            pending = self._describe(payload)
            committed = self._begin(pending.path)
            if committed is not None:
                return committed
            self._thread.copying(pending.encode)
            if self._thread.buffers is None:
                self._commit(pending)
                self._raise_own_failure()
            else:
                self._in_flight = file_names.parse(pending.path)
                self._thread.start(lambda: self._commit(pending))
            return pending.path

        return self._replicas.on_first(write)

    def _begin(self, path: Path) -> Path | None:
        """Wait for the save before; returns the checkpoint of this place if it is committed."""
        self._thread.wait()
        self._raise_own_failure()
        committed = self._find(file_names.parse(path) or (0, 0))
        if committed is not None:
            self.newest = committed
        return committed

    def _commit(self, pending: PendingCheckpoint) -> None:
        try:
            for listener in self._listeners:
                listener.before_commit()
            sidecar = self._folder.commit(pending)
            self.newest = pending.path
            self._refused = None
            for listener in self._listeners:
                listener.committed(pending.path, sidecar)
        except Exception as error:
            self._note_failure(pending.path, error)
        finally:
            self._in_flight = None

    def _note_failure(self, path: Path, error: Exception) -> None:
        """Say that a save has failed, and whether the next one tries again or the run ends."""
        if isinstance(error, OSError) and self._folder.options.on_save_error != "raise":
            self._refused = (path, error)
            text = (
                f": {error}. The newest safe one is {self._newest_name}. Training continues, and "
                "the next due save tries again. Meanwhile, check the disk (space, quota, "
                "permissions)."
            )
        else:
            self.failure = error
            text = (
                f" ({type(error).__name__}: {error}). Training ends with this error at its next "
                "safe point; older checkpoints are unchanged."
            )
        for listener in self._listeners:
            try:
                listener.save_failed(path, error)
            except Exception as other:
                # Raised in the thread, it would be lost.
                self.failure = self.failure or other
        # Also one that is raised: if another error ends the training first, it would go unnoticed.
        _LOGGER.error("The checkpoint %s %s%s", path, self._describe_fate(path), text)

    def _describe_fate(self, path: Path) -> str:
        if self._find(file_names.parse(path) or (0, 0)) is None:
            return "was NOT saved"
        # The name exists, but the disk has not confirmed that it is durable.
        return "was written, but the disk did not confirm it, and a power cut may lose it"

    def has(self, state: TrainingState) -> bool:
        """Return whether rank 0 has a checkpoint of this iteration, committed or in progress."""
        place = state.global_epoch, state.global_iteration
        is_there = self._replicas.rank == 0 and (
            self._in_flight == place or self._find(place) is not None
        )
        (is_there,) = self._replicas.agree(is_there)
        return is_there

    def _find(self, place: tuple[int, int]) -> Path | None:
        try:
            return self._folder.find(*place)
        except OSError:
            # A folder that cannot be listed is no reason to fail here: the save will report it.
            return None

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the run, in all processes."""
        self._replicas.on_first(self._raise_own_failure)

    def _raise_own_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def wait(self) -> Path | None:
        """Wait until this process writes nothing; returns the newest checkpoint."""
        self._thread.wait()
        return self.newest

    def finish(self, conclude: Callable[[Path | None], None]) -> None:
        """Wait until all checkpoints are on the disk; see the base."""
        self._replicas.on_first(partial(self._finish, conclude))

    def _finish(self, conclude: Callable[[Path | None], None]) -> None:
        self._thread.wait()
        self._raise_own_failure()
        if self._refused is not None:
            path, error = self._refused
            raise SaveError(
                f"The last checkpoint, {path}, {self._describe_fate(path)}: {error}. The newest "
                f"safe one is {self._newest_name}. Free disk space or fix the permissions, and run "
                "the same command again: it repeats the missing steps, with the same bits."
            ) from error
        conclude(self.newest)

    def close(self) -> None:
        """Wait for the save in progress, also after an error, and release the memory."""
        self._thread.close()


class ShardedWriter(PlainWriter):
    """Saves checkpoints of sharded models: each process writes its shards.

    The processes write together, in a thread of each with a group of its own. Rank 0 commits, and
    decides whether a failure ends the training.
    """

    def __init__(self, folder: RunFolder, describe: Describe, **rest: Any) -> None:
        super().__init__(folder, describe, **rest)
        self._copies = WriterThread(
            "helios-shards",
            content="the shards of this process",
            copies=folder.options.is_async,
            pins=rest.get("pins", False),
        )
        self._group = saving_group()

    def _save(self, payload: dict[str, Any]) -> Path:
        self._thread.wait()
        payload, rows = split_sharded(payload)
        described: list[PendingCheckpoint] = []

        def begin() -> tuple[Path, bool]:
            described.append(self._describe(payload))
            committed = self._begin(described[0].path)
            return committed or described[0].path, committed is None

        path, is_new = self._replicas.on_first(begin)
        if not is_new:
            return path
        copies: list[Mapping[str, OwnRows]] = []

        def copy() -> bool:
            copies.append(self._copies.copying(partial(copy_rows, rows)))
            for pending in described:
                self._thread.copying(pending.encode)
            return self._copies.buffers is not None and self._thread.buffers is not None

        # No process begins to write before all have copied: an error would leave others waiting.
        is_now = not all(self._replicas.on_each(copy))
        draft = files.temporary_path(path)

        def write() -> None:
            written: dict[str, FileFacts] | Exception
            try:
                written = save_rows(
                    draft, copies[0], self._group, hashes=self._folder.options.digest
                )
            except Exception as error:
                # Rank 0 raises it.
                written = error
            for pending in described:
                pending.rows = written
                self._commit(pending)
                # What a listener has refused was not begun to be committed.
                with contextlib.suppress(OSError):
                    files.remove_folder(draft)

        if is_now:
            write()
            self._replicas.on_first(self._raise_own_failure)
        else:
            self._in_flight = file_names.parse(path)
            self._thread.start(write)
        return path

    def close(self) -> None:
        """Wait until this process writes nothing, and release the memory."""
        try:
            super().close()
        finally:
            self._copies.close()

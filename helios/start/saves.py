"""The content of a run's checkpoints, and the mark of a finished run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import CheckpointWriter, PlainWriter, ShardedWriter
from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import PendingCheckpoint
from helios.core.loss_means import as_numbers
from helios.core.utils import Clock
from helios.counters import Phase
from helios.listeners import RunListener
from helios.plugins.averaging import WeightAverage
from helios.run_state import RunState
from helios.start.changes import is_shortened
from helios.start.level import Reproducibility, find_compiled
from helios.start.origin import Origin
from helios.start.run import Run
from helios.start.run_log import log_places

_LOGGER = logging.getLogger(__name__)


@final
class SaveTimer(RunListener):
    """Requests a save if the last one is too long ago, by the clock of this process.

    Args:
        run: the run.
        seconds: the time between two saves.
        clock: returns the time in seconds.
    """

    def __init__(self, run: RunState, seconds: float, clock: Clock = time.monotonic) -> None:
        self._run = run
        self._seconds = seconds
        self._clock = clock
        self._next = clock() + seconds

    def opened(self) -> None:
        """Start the time: what came before was no training."""
        self._next = self._clock() + self._seconds

    def saving(self) -> Mapping[str, Any]:
        """Start the time anew."""
        self.opened()
        return {}

    def ask(self, before: Callable[[], str]) -> str:
        """Request a save at the next safe point, if it is time; returns what ``before`` does."""
        if self._clock() >= self._next:
            self.opened()
            self._run.asked.is_checkpoint_wanted = True
        return before()


@final
@dataclass
class Saves:
    """Completes the checkpoints of one training, which its writer saves.

    Attributes:
        run: the call; its model appends to checkpoint names and holds the metrics.
        origin: where the run starts.
        options: what the checkpoints hold of the definition of the run.
        changes: changes that were allowed, in all starts of the run.
        level: the level of reproducibility that the run reaches.
        machine: versions, devices and settings that bits of arithmetic depend on.
        listeners: what listens to the run.
        writer: writes the checkpoints; nothing without a folder.
    """

    run: Run
    origin: Origin
    options: dict[str, Any]
    changes: list[str]
    level: Reproducibility
    machine: dict[str, str]
    listeners: Sequence[RunListener]
    writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        record = self.origin.record
        self._is_shorter = record is not None and is_shortened(self.run.options, record.options)
        self.writer = self._make_writer()
        self.run.settings.callback(self.writer.close)

    def _make_writer(self) -> CheckpointWriter:
        folder, loaded = self.origin.folder, self.origin.loaded
        newest = None if loaded is None else loaded.path
        if folder is None:
            # A replay emits the events of its saves, and writes nothing.
            return CheckpointWriter(newest, None if loaded is None else loaded.record.place)
        self.run.model.discovery.limit = folder.options.max_plain_bytes
        make = PlainWriter if self.run.replicas.share is None else ShardedWriter
        return make(
            folder,
            self._describe,
            replicas=self.run.replicas,
            pins=self.run.engine.device.type == "cuda",
            listeners=self.listeners,
            newest=newest,
        )

    def _describe(self, payload: dict[str, Any]) -> PendingCheckpoint:
        """Complete what hooks have left of a payload, and say how it is written; on rank 0."""
        folder, lock = self.origin.folder, self.origin.lock
        assert folder is not None
        if not folder.path.is_dir():
            _LOGGER.warning(
                "The folder %s disappeared during the run: it was deleted or moved, or its disk is "
                "gone. It is created again for new checkpoints; earlier ones are not in it.",
                folder.path,
            )
        if lock is not None and lock.owner:
            # Its file may have been deleted, or the lock lost.
            lock.acquire()
        stamp = {
            "options": self.options,
            "machine": self.machine,
            "resumed_from": self.origin.path,
            "ledger": None,
        }
        for listener in self.listeners:
            stamp |= listener.saving()
        record = Record.from_payload(payload | stamp | log_places())
        stem = file_names.stem(self.run.name, *record.place)
        stem = file_names.apply_metadata(stem, self.run.model.append_metadata_to_chkpt_name(stem))
        level = self.level.level_after(record, is_compiled=bool(find_compiled(self.run.model)))
        sidecar = Sidecar.of(
            record,
            run_name=self.run.name,
            level=level,
            # Scores of an earlier validation do not belong to these weights.
            metrics=as_numbers(self.run.model.metrics) if record.has_validated else {},
            averages=self._scored_averages if record.has_validated else [],
            changes=self.changes,
            is_by_epoch=self.run.options.limits.is_by_epoch,
        )
        path = folder.path_of(stem, is_sharded=self.run.replicas.share is not None)
        types = self.run.model.types_for_safe_load()
        return PendingCheckpoint(path, record.to_payload(), sidecar, types)

    @property
    def _scored_averages(self) -> list[str]:
        return [
            plugin.plug_id
            for plugin in self.run.plugins.values()
            if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(Phase.VALIDATION)
        ]

    def finish(self, reason: str | None) -> None:
        """Wait until all checkpoints of the run are on the disk.

        Args:
            reason: why the run has ended regularly, recorded in the sidecar of the last checkpoint;
                ``None`` after an interruption.

        Raises:
            SaveError: in all processes, if the disk refused the last checkpoint.
        """
        folder = self.origin.folder
        # A run that only loads has trained beside the checkpoint, which is not the end of its run.
        if folder is None or not self.run.options.can_save:
            return

        def conclude(newest: Path | None) -> None:
            self._write_last_lines()
            if reason is None or newest is None or self._is_past_its_end(newest):
                return
            try:
                folder.mark_finished(newest, reason)
            except OSError as error:
                _LOGGER.error(
                    "Could not mark the run as finished in %s: %s. Run the same command again: it "
                    "finds nothing to train, and marks the run.",
                    newest,
                    error,
                )

        self.writer.finish(conclude)

    def _write_last_lines(self) -> None:
        try:
            for listener in self.listeners:
                listener.before_commit()
        except OSError as error:
            _LOGGER.error(
                "The last line of the ledger could not be written: %s. All checkpoints are saved, "
                "but `helios verify` will report that the line is missing.",
                error,
            )

    def _is_past_its_end(self, newest: Path) -> bool:
        """Return whether nothing was trained, because a longer run has passed this end.

        The checkpoint belongs to that run, and is not its end.
        """
        loaded = self.origin.loaded
        return self._is_shorter and loaded is not None and loaded.path == newest

"""What a run writes into its folder: checkpoints, the ledger, and the file of its events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import CheckpointWriter, PlainWriter, ShardedWriter
from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import PendingCheckpoint, RunFolder
from helios.core.environment import describe_git
from helios.core.loss_means import as_numbers
from helios.core.utils import Clock, as_names
from helios.counters import Phase
from helios.ledger import run_file
from helios.ledger.book import EVERY, Book
from helios.ledger.line import LineReceiver, hash_of
from helios.ledger.run_file import RunFile, host
from helios.ledger.writer import LedgerWriter
from helios.listeners import Recorder, RunListener, Validated
from helios.model.model import Model
from helios.plugins.averaging import WeightAverage
from helios.replicas.replicas import Replicas
from helios.run_state import RunState
from helios.start.changes import is_shortened
from helios.start.level import Reproducibility, find_compiled
from helios.start.origin import Origin
from helios.start.run import Run
from helios.start.run_log import log_places
from helios.state.networks import name_buffers, name_weights

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
        origin: where the training starts.
        options: what the checkpoints hold of the definition of the run.
        changes: changes that were allowed, in all starts of the run.
        level: the level of reproducibility that the run reaches.
        machine: versions, devices and settings that bits of arithmetic depend on.
        writer: writes the checkpoints; nothing without a folder.
    """

    run: Run
    origin: Origin
    options: dict[str, Any]
    changes: list[str]
    level: Reproducibility
    machine: dict[str, str]
    writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        record = self.origin.record
        self._is_shorter = record is not None and is_shortened(self.run.options, record.options)
        folder, loaded = self.origin.folder, self.origin.loaded
        newest = None if loaded is None else loaded.path
        if folder is None:
            # A replay emits the events of its saves, and writes nothing.
            self.writer = CheckpointWriter(newest, None if record is None else record.place)
        else:
            self.run.model.discovery.limit = folder.options.max_plain_bytes
            make = PlainWriter if self.run.replicas.share is None else ShardedWriter
            self.writer = make(
                folder,
                self._describe,
                replicas=self.run.replicas,
                pins=self.run.engine.device.type == "cuda",
                listeners=self.run.listeners,
                newest=newest,
            )
        self.run.settings.callback(self.writer.close)

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
        for listener in self.run.listeners:
            stamp |= listener.saving()
        record = Record.from_payload(payload | stamp | log_places())
        stem = file_names.stem(self.run.name, *record.place)
        stem = file_names.apply_metadata(stem, self.run.model.append_metadata_to_chkpt_name(stem))
        level = self.level.level_after(record, is_compiled=bool(find_compiled(self.run.model)))
        averages = [
            plugin.plug_id
            for plugin in self.run.plugins.values()
            if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(Phase.VALIDATION)
        ]
        sidecar = Sidecar.of(
            record,
            run_name=self.run.name,
            level=level,
            # Scores of an earlier validation do not belong to these weights.
            metrics=as_numbers(self.run.model.metrics) if record.has_validated else {},
            averages=averages if record.has_validated else [],
            changes=self.changes,
            is_by_epoch=self.run.options.limits.is_by_epoch,
        )
        path = folder.path_of(stem, is_sharded=self.run.replicas.share is not None)
        types = self.run.model.types_for_safe_load()
        return PendingCheckpoint(path, record.to_payload(), sidecar, types)

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

        self.writer.finish(partial(self._conclude, folder, reason))

    def _conclude(self, folder: RunFolder, reason: str | None, newest: Path | None) -> None:
        try:
            for listener in self.run.listeners:
                listener.before_commit()
        except OSError as error:
            _LOGGER.error(
                "The last line of the ledger could not be written: %s. All checkpoints are saved, "
                "but `helios verify` will report that the line is missing.",
                error,
            )
        if reason is None or newest is None:
            return
        loaded = self.origin.loaded
        if self._is_shorter and loaded is not None and loaded.path == newest:
            # Nothing was trained, because a longer run has passed this one's end already. The
            # checkpoint belongs to that run, and is not its end.
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


# ---- the ledger, and the file of events

_MOST_CHARACTERS = 300


def hash_definition(definition: Mapping[str, Any], replicas: Replicas) -> str:
    """Return the hash of what defines a run, as the first line of its ledger holds it."""
    return hash_of({**definition, "num_replicas": replicas.num_replicas})


def make_writer(
    book: LineReceiver | None,
    model: Model,
    replicas: Replicas,
    *,
    every: int = EVERY,
    mark: Mapping[str, Any] | None = None,
    after: int = 0,
) -> LedgerWriter:
    """Return what makes the lines of a run.

    Args:
        book: takes the lines; ``None`` on ranks other than 0.
        model: the model.
        replicas: the replicas of the run.
        every: the number of steps between two hashes of the weights.
        mark: that of the ledger in the checkpoint that the run continues from.
        after: the last iteration before this start.
    """
    discovery = model.discovery

    def find_weights() -> dict[str, Tensor]:
        return name_weights(discovery.modules(), discovery.moved()[0])

    return LedgerWriter(
        book,
        replicas.local_replicas,
        num_processes=replicas.num_processes,
        find_weights=find_weights,
        find_buffers=lambda: name_buffers(discovery.saved_modules()),
        find_optimizers=discovery.optimizers,
        reads_weights=book is not None or replicas.is_sharded_over_processes,
        every=every,
        attributes=vars(model),
        mark=mark,
        after=after,
        unscored=as_names(model.unscored),
    )


@final
@dataclass
class RunEvents(Recorder):
    """Records the settings and events of a run, on rank 0.

    Attributes:
        file: where events are written.
        origin: where the run starts.
        book: the ledger, which the run may have lost.
        facts: what is known of this start, by name.
        changes: changes that were allowed, in all starts of the run.
    """

    file: RunFile
    origin: Origin
    book: Book
    facts: Mapping[str, Any]
    changes: Sequence[str]
    _is_open: bool = False

    def opened(self) -> None:
        """Add how the run starts, and what it had to leave behind."""
        origin, loaded, add = self.origin, self.origin.loaded, self.file.add
        self._is_open = True
        for path in [] if origin.folder is None else origin.folder.damaged:
            add(run_file.FALLBACK, checkpoint=path.name, cause="the file is damaged")
        found: dict[str, Any] = {"iteration": 0}
        if loaded is not None:
            found["iteration"] = loaded.record.place[1]
            found["checkpoint"] = str(loaded.path) if origin.is_branch else loaded.path.name
            found["digest"] = None if loaded.sidecar is None else loaded.sidecar.digest or None
        # Earlier starts have recorded theirs.
        changes = self.changes[len(origin.changes) :] or None
        add(run_file.START, **found, **self.facts, git=describe_git() or None, changes=changes)
        if loaded is not None and loaded.record.migrated_from is not None:
            add(run_file.MIGRATION, cause=f"helios-ml {loaded.record.migrated_from}")
        if self.book.loss is not None:
            add(run_file.LOST_LEDGER, cause=self.book.loss)

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Add a checkpoint."""
        self.file.add(run_file.SAVE, checkpoint=path.name, digest=sidecar.digest or None)

    def save_failed(self, path: Path, error: Exception) -> None:
        """Add a checkpoint that could not be written."""
        self.file.add(run_file.FAILED_SAVE, checkpoint=path.name, cause=_describe(error))

    def validated(self, validated: Validated) -> None:
        """Add the scores of a validation; without any nothing is written."""
        state = validated.state
        if validated.scores:
            self.file.add(
                run_file.VALIDATION,
                iteration=state.global_iteration,
                step=state.global_step,
                scores=validated.scores,
                has_improved=validated.has_improved or None,
                best=validated.best,
            )

    def ended(
        self, reason: str, *, interruption: str | None = None, error: BaseException | None = None
    ) -> None:
        """Add how training has ended; a start that is refused adds nothing."""
        if self._is_open:
            if error is not None:
                self.file.add(run_file.ERROR, cause=_describe(error))
            elif interruption is not None:
                self.file.add(run_file.INTERRUPTION, cause=interruption)
            else:
                self.file.add(run_file.END, cause=reason)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]


def make_recorders(
    origin: Origin,
    model: Model,
    replicas: Replicas,
    definition: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    changes: Sequence[str],
) -> list[Recorder]:
    """Return what records a run; no file is opened yet.

    Args:
        origin: where the run starts; it has a folder. A branch begins a ledger of its own.
        model: the model.
        replicas: the replicas of the run; rank 0 writes.
        definition: what defines the run.
        facts: what else is known of this start, by name.
        changes: changes that were allowed, in all starts of the run.
    """
    assert origin.folder is not None
    folder, run = origin.folder.path, hash_definition(definition, replicas)
    record = origin.record
    mark = None if record is None or origin.is_branch else record.ledger
    book = Book(folder, run=run) if replicas.rank == 0 else None
    writer = make_writer(
        book,
        model,
        replicas,
        every=EVERY if mark is None else mark["every"],
        mark=mark,
        after=0 if record is None else record.place[1],
    )
    if book is None:
        return [writer]
    own = {"run": run, "host": host(), "processes": replicas.num_processes}
    facts = {**own, **facts, "definition": definition}
    return [writer, RunEvents(RunFile(folder), origin, book, facts, changes)]

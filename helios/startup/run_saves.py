"""Saves the checkpoints and scores of a training: rank 0 alone, or each process what it holds."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helios.best import BestSoFar
from helios.checkpoint import file_names
from helios.checkpoint.disk_space import warn_if_too_large
from helios.checkpoint.rank_part import PartWriter, RankPart, SavePlan, split_sharded
from helios.checkpoint.record import Record
from helios.checkpoint.saver import Saver
from helios.checkpoint.sharded_commit import RankParts
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import CheckpointStore, Draft
from helios.core.text import as_numbers
from helios.distributed.process_groups import has_failed
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.ledger.writer import LedgerWriter
from helios.model.model import Model
from helios.plugins.averaging import WeightAverage
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.schedule import Schedule, count_saves
from helios.session import Session
from helios.startup.processes import on_each, on_first
from helios.startup.reproducibility_level import Reproducibility, find_compiled
from helios.startup.resume_point import Start
from helios.startup.run_evidence import RunEvidence
from helios.startup.run_log import ScoreLog, describe_progress, log_places, machine
from helios.state import Phase, TrainingState
from helios.state_graph.state_size import shard_sizes, storage_sizes
from helios.terminal import root_logger as log
from helios.terminal.progress import Display, NullDisplay


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint that is to be written.

    Attributes:
        path: where.
        payload: its content.
        sidecar: facts about it.
        safe_types: types that may be built when it is loaded.
    """

    path: Path
    payload: dict[str, Any]
    sidecar: Sidecar
    safe_types: Iterable[Any]


Describe = Callable[[Record], Description]
"""Completes a record on rank 0, and says how it is written."""


def make_saves(
    saver: Saver, replicas: Replicas, options: CheckpointStore, *, pins: bool
) -> RunSaves:
    """Return the saves of a run; the arguments are those of :class:`ShardedSaves`."""
    if replicas.share is not None:
        return ShardedSaves(saver, replicas, options, pins=pins)
    return RunSaves(saver, replicas)


class RunSaves:
    """The saves of a run whose models are whole: rank 0 writes them.

    All processes call each method together, unless it says otherwise.

    Args:
        saver: writes the files, on rank 0.
        replicas: the processes.
    """

    def __init__(self, saver: Saver, replicas: Replicas) -> None:
        self._saver = saver
        self._replicas = replicas

    def prepare(self, sizes: list[int]) -> None:
        """Allocate memory for copies of storages of these sizes; each process for itself."""
        if self._replicas.rank == 0:
            self._saver.prepare(sizes)

    def save(self, snapshot: dict[str, Any], describe: Describe) -> Path:
        """Save a snapshot; returns its path, which another thread may still be writing to.

        Args:
            snapshot: the content; may change after this returns.
            describe: called on rank 0.

        Raises:
            Exception: on all processes, the failure of this save, or of the one before.
        """

        def write() -> Path:
            told = describe(Record.from_payload(snapshot))
            return self._saver.save(
                told.payload,
                stem=told.path.stem,
                sidecar=told.sidecar,
                safe_types=told.safe_types,
            )

        return on_first(self._replicas, write)

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed, as far as this process knows; each process for itself."""
        return self._saver.failure is not None

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the training."""
        on_first(self._replicas, self._saver.raise_failure)

    def conclude_parts(self) -> None:
        """Wait until nothing but rank 0 writes."""

    def settle(self) -> Path | None:
        """Wait until this process writes nothing, and return the newest checkpoint of rank 0."""
        self._saver.wait()
        return self._saver.newest

    def close(self) -> None:
        """Wait until this process writes nothing, whatever has happened, and free its memory."""
        self._saver.close()


class ShardedSaves(RunSaves):
    """The saves of a run whose models are sharded: each process writes what it holds.

    Whether a failure ends the training is decided on rank 0, which learns of one by a file in the
    draft, or else at the next safe point.

    Args:
        saver: commits the checkpoints, on rank 0.
        replicas: the processes.
        options: how checkpoints are written.
        pins: whether the state is on CUDA devices.
    """

    def __init__(
        self, saver: Saver, replicas: Replicas, options: CheckpointStore, *, pins: bool
    ) -> None:
        super().__init__(saver, replicas)
        self._hashes = options.digest
        self._parts = PartWriter(replicas.rank, is_async=options.is_async, pins=pins)
        self._newest: RankParts | None = None

    def prepare(self, sizes: list[int]) -> None:
        """Allocate memory for copies of this process's shards."""
        self._parts.prepare(sizes)

    def save(self, snapshot: dict[str, Any], describe: Describe) -> Path:
        """Save a snapshot; see the base."""
        self.conclude_parts()
        payload, rows = split_sharded(snapshot)
        described: list[Description] = []

        def begin() -> tuple[Path, str]:
            told = describe(Record.from_payload(payload))
            described.append(told)
            committed = self._saver.begin(told.path.stem)
            return (committed, "") if committed is not None else (told.path, secrets.token_hex(8))

        path, token = on_first(self._replicas, begin)
        if not token:
            return path
        plan = SavePlan(path, token, self._replicas.num_processes, self._hashes)
        drafts: list[Draft] = []

        def draft() -> tuple[RankPart, bool]:
            part, is_own = self._parts.draft(plan, rows)
            if self._replicas.rank == 0:
                self._newest = RankParts(part, has_failed)
                drafts.append(self._draft(described[0], self._newest))
                is_own = is_own and drafts[0].is_own
            return part, is_own

        self._write(draft, drafts)
        return path

    def _draft(self, told: Description, parts: RankParts) -> Draft:
        return self._saver.draft(
            told.payload,
            stem=told.path.stem,
            sidecar=told.sidecar,
            safe_types=told.safe_types,
            parts=parts,
        )

    def _write(self, draft: Callable[[], tuple[RankPart, bool]], drafts: list[Draft]) -> None:
        own: list[RankPart] = []

        def prepare() -> bool:
            part, is_own = draft()
            own.append(part)
            return is_own

        # No process begins to write before all have drafted: an error would leave rank 0 waiting.
        is_now = not all(on_each(self._replicas, prepare))
        if self._replicas.rank:
            if not is_now:
                self._parts.start(own[0])
                return
            self._parts.write(own[0])
        elif not is_now:
            self._saver.write(drafts[0], is_now=False)
            return
        else:
            assert self._newest is not None
            self._newest.try_own()
        self.conclude_parts()
        on_first(self._replicas, lambda: self._saver.write(drafts[0], is_now=True))

    @property
    def has_failed(self) -> bool:
        """Whether a part or a whole save has failed, as far as this process knows."""
        return self._parts.has_failed or super().has_failed

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the training."""
        self._report_parts()
        super().raise_failure()

    def conclude_parts(self) -> None:
        """Wait until nothing but rank 0 writes, and let it know of parts that have failed."""
        self._parts.wait()
        self._report_parts()

    def _report_parts(self) -> None:
        reports = on_each(self._replicas, self._parts.take_failure)
        failures = [failure for failure in reports if failure is not None]
        if failures and self._newest is not None:
            for token, text in failures:
                self._newest.fail(token, text)
            self._saver.wait()

    def close(self) -> None:
        """Wait until this process writes nothing, and free its memory."""
        try:
            super().close()
        finally:
            self._parts.close()


_LOGGER = logging.getLogger(__name__)


class FitRecorder:
    """Writes the checkpoints and scalars of one training; without a folder, no checkpoints.

    Args:
        name: the name of the run.
        model: appends to checkpoint names and holds the metrics.
        start: the run's folder, definition and history.
        reproducibility: the level of reproducibility that the run reaches.
        engine: the engine, with the replicas; rank 0 writes.
        schedule: determines whether checkpoints are written.
        evidence: what the run records of itself; ``None`` for nothing.
        plugins: those of the run; a validation may use averages of theirs.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        start: Start,
        *,
        reproducibility: Reproducibility,
        engine: Engine,
        schedule: Schedule,
        evidence: RunEvidence | None,
        plugins: Collection[Plugin],
    ) -> None:
        self._name = name
        self._plugins = plugins
        self._schedule = schedule
        self._model = model
        self._start = start
        self._reproducibility = reproducibility
        self._replicas = engine.replicas
        self._machine = machine(engine)
        self._saver: Saver | None = None
        self._saves: RunSaves | None = None
        self._scores = ScoreLog()
        self._display: Display = NullDisplay()
        self._newest: Path | None = None if start.loaded is None else start.loaded.path
        self._evidence = evidence
        # A replay emits the events of its saves, and writes nothing.
        self._unwritten = None if start.loaded is None else start.loaded.record.place
        self._begun_at = 0 if self._unwritten is None else self._unwritten[1]
        if start.folder is not None:
            pins = engine.device.type == "cuda"
            self._saver = Saver(start.folder, pins=pins, watcher=evidence)
            self._saver.newest = self._newest
            self._saves = make_saves(self._saver, self._replicas, start.folder.options, pins=pins)
            model.discovery.values.limit = start.folder.options.max_plain_bytes

    @property
    def ledger(self) -> LedgerWriter | None:
        """The ledger; ``None`` if the run has none."""
        return None if self._evidence is None else self._evidence.ledger

    def show_on(self, display: Display) -> None:
        """Show the scores of validations in progress bars, too."""
        self._display = display

    def describe_end(self, session: Session, *, seconds: float) -> str:
        """Return how far the training has come, as lines for the log; waits for saves.

        Args:
            session: the training.
            seconds: the time of this start.
        """
        newest, best = self.settle(), session.best.best
        file_name = None
        if best is not None and newest is not None:
            paths = file_names.find_checkpoints(newest.parent)
            names = {file_names.iteration_of(path): path.name for path in paths}
            file_name = names.get(best.iteration, "")
        return describe_progress(
            session.state,
            seconds=seconds,
            begun_at=self._begun_at,
            scores=self._scores.summarize(best, file_name),
            nonfinite=session.nonfinite,
            newest=newest,
            has_report=self._evidence is not None,
        )

    def prepare(self, state: TrainingState) -> None:
        """Allocate memory for the first save, and warn if the disk is too small.

        Args:
            state: the counters at the start of training.
        """
        saves, folder = self._saves, self._start.folder
        if saves is None or folder is None:
            return
        discovery = self._model.discovery
        parts = (discovery.modules().values(), discovery.optimizers().values())
        sizes = storage_sizes(*parts)
        saves.prepare(shard_sizes(*parts) or sizes)
        if self._replicas.rank != 0:
            return
        warn_if_too_large(
            folder.path,
            num_bytes=sum(sizes) + discovery.values.num_bytes,
            num_saves=count_saves(self._schedule, state),
            options=folder.options,
        )

    def settle(self) -> Path | None:
        """Wait for saves in progress and return the newest checkpoint; ``None`` if there is none.

        Processes that do not write return the file that was begun last.
        """
        if self._saves is None or self._replicas.rank != 0:
            return self._newest
        return self._saves.settle()

    def save(self, snapshot: dict[str, Any]) -> None:
        """Save a snapshot as a checkpoint of the run; all processes wait until it is copied.

        Args:
            snapshot: the content.

        Raises:
            UsageError: after a collective has failed: the processes may be at different points.
        """
        saves = self._saves
        if saves is None:
            self._unwritten = Record.from_payload(snapshot).place
            return
        if has_failed():
            raise UsageError(
                "No checkpoint can be saved after a collective has failed, because the processes "
                "may be at different points. Let the error end this process, and start the run "
                "again: it resumes from the newest checkpoint."
            )
        self._newest = saves.save(snapshot, self._describe)

    def _describe(self, record: Record) -> Description:
        if self._start.lock is not None:
            self._start.lock.renew()
        record = replace(
            record,
            options=self._start.definition,
            machine=self._machine,
            resumed_from=self._start.origin,
            ledger=None if self._evidence is None else self._evidence.mark(),
            rewinds=[each.as_plain() for each in self._start.rewinds],
            **log_places(),
        )
        stem = file_names.stem(self._name, *record.place)
        stem = file_names.apply_metadata(stem, self._model.append_metadata_to_chkpt_name(stem))
        sidecar = Sidecar.of(
            record,
            run_name=self._name,
            level=self._reproducibility.level_after(
                record, is_compiled=bool(find_compiled(self._model))
            ),
            # Scores of an earlier validation do not belong to these weights.
            metrics=as_numbers(self._model.metrics) if record.has_validated else {},
            averages=self._scored_averages if record.has_validated else [],
            changes=self._start.changes,
            is_by_epoch=self._schedule.is_by_epoch,
        )
        assert self._start.folder is not None
        path = self._start.folder.path_of(stem, is_sharded=self._replicas.share is not None)
        types = self._model.types_for_safe_load()
        return Description(path, record.to_payload(), sidecar, types)

    @property
    def _scored_averages(self) -> list[str]:
        return [
            plugin.plug_id
            for plugin in self._plugins
            if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(Phase.VALIDATION)
        ]

    def has_saved(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this iteration is committed or in progress; rank 0 looks."""
        saver, replicas = self._saver, self._replicas
        if saver is None:
            return self._unwritten == (state.global_epoch, state.global_iteration)
        is_there = replicas.rank == 0 and saver.has(state.global_epoch, state.global_iteration)
        (is_there,) = replicas.agree(is_there)
        return is_there

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed, as far as this process knows."""
        return self._saves is not None and self._saves.has_failed

    def raise_failure(self) -> None:
        """Raise the error of a failed save that must end the training, in all processes."""
        if self._saves is not None:
            self._saves.raise_failure()

    @property
    def logs_scalars(self) -> bool:
        """Whether there are event files, which rank 0 writes."""
        return self._replicas.rank == 0 and log.get_tensorboard_writer() is not None

    def show_scores(
        self,
        scores: Mapping[str, float],
        state: TrainingState,
        *,
        has_improved: bool,
        best: BestSoFar,
        by_hand: Collection[str],
        losses: Mapping[str, float],
    ) -> None:
        """Log the scores of a validation, by name; other ranks than 0 log errors only.

        Raises:
            UsageError: if the score that decides which checkpoints are the best is not among them.
        """
        rule = None if self._start.folder is None else self._start.folder.options.keep_best
        if rule is not None and self._schedule.chkpt_frequency is not None:
            rule.check_scores(scores)
        text = self._scores.show(scores, state, best=best.best, losses=losses)
        self._display.note_scores(text)
        if self._evidence is not None:
            self._evidence.note_scores(
                state.global_iteration,
                scores,
                step=state.global_step,
                has_improved=has_improved,
                best=best.best,
                by_hand=by_hand,
            )

    def note_mismatch(self, text: str, hosts: Sequence[str]) -> None:
        """Add what an audit has found to the lineage."""
        if self._evidence is not None:
            self._evidence.note_mismatch(text, hosts)

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write numbers to the event files, by name.

        A scalar that user code has written at this iteration, as scripts of Helios 1 do, is kept.
        """
        writer, step = log.get_tensorboard_writer(), state.global_iteration
        if writer is None or not self.logs_scalars:
            return
        for name, value in scalars.items():
            if not writer.has_point(name, step):
                writer.add_scalar(name, value, step)

    def finish(self, reason: str | None) -> None:
        """Wait until all checkpoints of the run are on the disk.

        Args:
            reason: why the run has ended regularly, recorded in the sidecar of the last checkpoint;
                ``None`` after an interruption.

        Raises:
            SaveError: in all processes, if the disk refused the last checkpoint.
        """
        saver, saves, folder = self._saver, self._saves, self._start.folder
        # A run that only loads has trained beside the checkpoint, which is not the end of its run.
        if saves is None or folder is None or self._schedule.chkpt_frequency is None:
            return
        assert saver is not None
        saves.conclude_parts()

        def conclude() -> None:
            saver.finish()
            self._conclude_ledger()
            if reason is None or saver.newest is None or self._is_past_its_end(saver.newest):
                return
            try:
                folder.mark_finished(saver.newest, reason)
            except OSError as error:
                _LOGGER.error(
                    "Could not mark the run as finished in %s: %s. Run the same command again: it "
                    "finds nothing to train, and marks the run.",
                    saver.newest,
                    error,
                )

        on_first(self._replicas, conclude)

    def _conclude_ledger(self) -> None:
        try:
            if self._evidence is not None:
                self._evidence.before_commit()
        except OSError as error:
            _LOGGER.error(
                "The last line of the ledger could not be written: %s. All checkpoints are saved, "
                "but `helios verify` will report that the line is missing.",
                error,
            )

    def _is_past_its_end(self, newest: Path) -> bool:
        """Whether nothing was trained because a longer run has already passed this one's end.

        The checkpoint belongs to that run, and is not its end.
        """
        loaded = self._start.loaded
        return self._start.is_shortened and loaded is not None and loaded.path == newest

    def close(self) -> None:
        """Wait for saves in progress, whatever has happened."""
        if self._saves is not None:
            self._saves.close()

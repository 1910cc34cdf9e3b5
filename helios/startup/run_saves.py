"""What a training writes into its checkpoints and logs, and when it is finished."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from helios.best import BestSoFar
from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import CheckpointWriter, PlainWriter, ShardedWriter
from helios.checkpoint.disk_space import warn_if_too_large
from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar
from helios.checkpoint.store import PendingCheckpoint
from helios.core.summands import as_numbers
from helios.engines.engine import Engine
from helios.ledger.writer import LedgerWriter
from helios.model.model import Model
from helios.plugins.averaging import WeightAverage
from helios.plugins.plugin import Plugin
from helios.schedule import Schedule, count_saves
from helios.session import Session
from helios.startup.reproducibility_level import Reproducibility, find_compiled
from helios.startup.resume_point import Start
from helios.startup.run_evidence import RunEvidence
from helios.startup.run_log import ScoreLog, describe_progress, log_places, machine
from helios.state import Phase, TrainingState
from helios.state_graph.state_size import shard_sizes, storage_sizes
from helios.terminal import root_logger as log
from helios.terminal.progress import Display, NullDisplay

_LOGGER = logging.getLogger(__name__)


class FitRecorder:
    """Completes the checkpoints of one training, and writes its scalars and scores.

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
        self._scores = ScoreLog()
        self._display: Display = NullDisplay()
        self._evidence = evidence
        self._begun_at = 0 if start.loaded is None else start.loaded.record.place[1]
        self.writer = self._make_writer(engine)

    def _make_writer(self, engine: Engine) -> CheckpointWriter:
        folder, loaded = self._start.folder, self._start.loaded
        newest = None if loaded is None else loaded.path
        if folder is None:
            # A replay emits the events of its saves, and writes nothing.
            return CheckpointWriter(newest, None if loaded is None else loaded.record.place)
        self._model.discovery.values.limit = folder.options.max_plain_bytes
        make = PlainWriter if self._replicas.share is None else ShardedWriter
        return make(
            folder,
            self._describe,
            replicas=self._replicas,
            pins=engine.device.type == "cuda",
            listeners=[] if self._evidence is None else [self._evidence],
            newest=newest,
        )

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
        newest, best = self.writer.wait(), session.best.best
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
        folder = self._start.folder
        if folder is None:
            return
        discovery = self._model.discovery
        parts = (discovery.modules().values(), discovery.optimizers().values())
        sizes = storage_sizes(*parts)
        self.writer.prepare(shard_sizes(*parts) or sizes)
        if self._replicas.rank != 0:
            return
        warn_if_too_large(
            folder.path,
            num_bytes=sum(sizes) + discovery.values.num_bytes,
            num_saves=count_saves(self._schedule, state),
            options=folder.options,
        )

    def _describe(self, payload: dict[str, Any]) -> PendingCheckpoint:
        """Complete what hooks have left of a payload, and say how it is written; on rank 0."""
        if self._start.lock is not None:
            self._start.lock.renew()
        stamp = {
            "options": self._start.definition,
            "machine": self._machine,
            "resumed_from": self._start.origin,
            "ledger": None if self._evidence is None else self._evidence.mark(),
            "rewinds": [each.as_plain() for each in self._start.rewinds],
        }
        record = Record.from_payload(payload | stamp | log_places())
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
        return PendingCheckpoint(path, record.to_payload(), sidecar, types)

    @property
    def _scored_averages(self) -> list[str]:
        return [
            plugin.plug_id
            for plugin in self._plugins
            if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(Phase.VALIDATION)
        ]

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
        folder = self._start.folder
        # A run that only loads has trained beside the checkpoint, which is not the end of its run.
        if folder is None or self._schedule.chkpt_frequency is None:
            return

        def conclude(newest: Path | None) -> None:
            self._conclude_ledger()
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

"""The evidence of a run: ledger, manifest, lineage and times, in the folder of the run.

The ledger joins its file to the loops and to the checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import helios.ledger.lineage as lineage
from helios.best import BestValidation
from helios.checkpoint.run_listener import RunListener
from helios.checkpoint.sidecar import Sidecar
from helios.core import rng
from helios.core.peak_memory import find_peak_memory
from helios.errors import LedgerError
from helios.ledger.book import EVERY, Book
from helios.ledger.differences import LedgerFollower
from helios.ledger.line import FULL, STEPS, hash_of
from helios.ledger.lineage import Lineage, now
from helios.ledger.scrubbing import scrub
from helios.ledger.tensor_digests import TensorDigests, WeightDigests
from helios.ledger.timing import Timing
from helios.ledger.writer import LedgerWriter, LineReceiver
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.startup.resume_point import Start
from helios.startup.rewinding import RewindPlan, find_events
from helios.startup.run_manifest import RunManifest
from helios.startup.trainer_options import Options
from helios.state_graph.network_parts import name_buffers, name_weights

_LOGGER = logging.getLogger(__name__)


@dataclass
class RunLedger:
    """The ledger of a run.

    Attributes:
        run: hash of the run's definition.
        writer: what the loops see of it.
        book: its file, which rank 0 writes; ``None`` on other ranks.
        found: the mark in the checkpoint that the run continues from.
        after: the last iteration before this start.
        unscored: names of scores that are left out.
    """

    run: str
    writer: LedgerWriter
    book: Book | None
    found: dict[str, Any] | None
    after: int
    unscored: Collection[str] = ()

    def open(self) -> str | None:
        """Begin or continue the file, once nothing can refuse the start any more.

        Returns:
            Why the ledger of the checkpoint could not be continued; ``None`` if it was.
        """
        self.writer.open()
        if self.book is None:
            return None
        self.book.open(self.found, after=self.after)
        return self.book.loss

    def add_scores(
        self, iteration: int, scores: Mapping[str, float], by_hand: Mapping[str, int]
    ) -> None:
        """Add the scores of a validation after the line of an iteration; rank 0 has both."""
        if self.book is not None:
            self.writer.settle()
            self.book.append_scores(iteration, scores, self.unscored, by_hand)

    def mark(self) -> dict[str, Any] | None:
        """Return the size and hash for a checkpoint; ``None`` on ranks other than 0."""
        self.writer.settle()
        return None if self.book is None else self.book.mark()

    def sync(self) -> None:
        """Wait until all lines are on the disk; raises ``OSError`` if they cannot be written."""
        if self.book is not None:
            self.book.sync()

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        self.writer.close()
        if self.book is not None:
            # After an error of an accelerator, its numbers cannot be read.
            with contextlib.suppress(RuntimeError):
                self.writer.settle()
            self.book.close()


def make_ledger(
    start: Start,
    model: Model,
    replicas: Replicas,
    definition: Mapping[str, Any],
    *,
    level: str,
    timing: Timing | None,
) -> RunLedger:
    """Return the ledger of a run; its file is not opened yet.

    Args:
        start: where the run starts. A branch of another run begins a ledger of its own.
        model: the model.
        replicas: the replicas of the run; rank 0 writes.
        definition: what defines the run.
        level: ``"steps"`` or ``"full"``; a ledger that continues keeps its own.
        timing: the times of the run; ``None`` on ranks other than 0.
    """
    assert start.folder is not None
    record = None if start.loaded is None else start.loaded.record
    run = hash_definition(definition, replicas)
    found = None if record is None or start.is_branch else record.ledger
    if found is not None:
        level = _continue_level(found.get("level", STEPS), level, is_first=replicas.rank == 0)
    book = Book(start.folder.path, run=run, level=level) if replicas.rank == 0 else None
    every = EVERY if found is None else found["every"]
    writer = make_writer(book, model, replicas, level, timing, every=every)
    return RunLedger(
        run,
        writer,
        book,
        found,
        after=0 if record is None else record.place[1],
        unscored=model.unscored,
    )


def hash_definition(definition: Mapping[str, Any], replicas: Replicas) -> str:
    """Return the hash of what defines a run, as the first line of its ledger holds it."""
    return hash_of({**definition, "num_replicas": replicas.num_replicas})


def make_writer(
    book: LineReceiver | None,
    model: Model,
    replicas: Replicas,
    level: str,
    timing: Timing | None = None,
    *,
    every: int = EVERY,
) -> LedgerWriter:
    """Return what makes the lines of a run.

    Args:
        book: takes the lines; ``None`` on ranks other than 0.
        model: the model.
        replicas: the replicas of the run.
        level: ``"steps"`` or ``"full"``.
        timing: the times of the run; ``None`` where nothing is written.
        every: the number of steps between two hashes of the weights.
    """
    discovery, tensors = model.discovery, None
    reads_weights = book is not None or replicas.is_sharded_over_processes

    def find_weights() -> dict[str, Tensor]:
        return name_weights(discovery.modules(), discovery.moved()[0])

    if level == FULL:
        tensors = TensorDigests(
            reads_weights=reads_weights,
            find_weights=find_weights,
            read_generators=lambda: _read_generators(replicas.device),
            gather=replicas.gather_replicas,
        )
    return LedgerWriter(
        book,
        replicas.local_replicas,
        weights=WeightDigests(
            find_weights,
            discovery.optimizers,
            lambda: name_buffers(discovery.saved_modules()),
            is_read=reads_weights,
            every=every,
        ),
        find_optimizers=discovery.optimizers,
        attributes=vars(model),
        tensors=tensors,
        timing=timing,
    )


def _continue_level(found: str, asked: str, *, is_first: bool) -> str:
    """Return the level of a ledger that continues, and warn if another one is set."""
    if found != asked and is_first:
        _LOGGER.warning(
            'Trainer(ledger="%s") has no effect: the ledger of this run was begun with "%s", and '
            'all of its lines are of one kind. Pass ledger="%s", or resume=<checkpoint> with '
            "another chkpt_root, which begins a new ledger.",
            asked,
            found,
            found,
        )
    return found


def _read_generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that are seeded for each iteration."""
    found = rng.get_rng_state_dict()
    states = {"torch": found["torch"], "random": found["rand"], "numpy": found["numpy"]}
    if device.type == "cuda" and "cuda" in found:
        states["cuda"] = found["cuda"][device.index or 0]
    return states


_MOST_CHARACTERS = 300


class RunEvidence(RunListener):
    """What a run records of itself, beside its checkpoints.

    Args:
        ledger: the ledger, which all processes help to write.
        manifest: the manifest; ``None`` on ranks other than 0.
        events: the lineage; ``None`` on ranks other than 0.
        timing: the times; ``None`` on ranks other than 0.
        processes: the number of processes.
        follower: in a replay, what compares the scores of rank 0.
        num_known: how many allowed changes earlier starts have recorded.
    """

    def __init__(
        self,
        ledger: RunLedger,
        manifest: RunManifest | None = None,
        events: Lineage | None = None,
        *,
        timing: Timing | None = None,
        processes: int = 1,
        follower: LedgerFollower | None = None,
        num_known: int = 0,
    ) -> None:
        self._ledger = ledger
        self._manifest = manifest
        self._events = events
        self._timing = timing
        self._processes = processes
        self._follower = follower
        self._num_known = num_known
        self._is_open = False

    @property
    def ledger(self) -> LedgerWriter:
        """What the loops see."""
        return self._ledger.writer

    def check(self) -> str:
        """Return a sentence on what differs from the start that wrote the checkpoint; may be empty.

        Raises:
            RunMismatchError: naming what may change the training, if the user demands it.
        """
        return "" if self._manifest is None else self._manifest.check()

    def open(self, start: Start) -> None:
        """Begin or continue the files, once nothing can refuse the start any more.

        Args:
            start: where the run starts.
        """
        loaded = start.loaded
        loss = self._ledger.open()
        self._is_open = True
        iteration = 0 if loaded is None else loaded.record.place[1]
        begin = {"host": lineage.host(), "processes": self._processes, "iteration": iteration}
        if loaded is not None:
            digest = None if loaded.sidecar is None else loaded.sidecar.digest
            begin |= {"checkpoint": loaded.path.name, "digest": digest or None}
        for path in [] if start.folder is None else start.folder.damaged:
            self._add(lineage.FALLBACK, checkpoint=path.name, cause="the file is damaged")
        for plan in start.plans if self._events is not None else []:
            self._add_rewind(start, plan)
        if loaded is None:
            self._add(lineage.START, **begin)
        else:
            self._add(lineage.BRANCH if start.is_branch else lineage.RESUME, **begin)
            origin = loaded.record.migrated_from
            if origin is not None:
                self._add(lineage.MIGRATION, cause=f"helios-ml {origin}")
        for text in start.changes[self._num_known :]:
            self._add(lineage.CHANGE, cause=text)
        if loss is not None:
            self._add(lineage.LOST_LEDGER, cause=loss)
        if self._manifest is not None:
            known = {name: value for name, value in begin.items() if value is not None}
            self._manifest.open({"time": now(), **known})
        if self._timing is not None:
            self._timing.begin(iteration)

    def _add_rewind(self, start: Start, plan: RewindPlan) -> None:
        """Add a rewind, unless a killed start has added it."""
        assert start.folder is not None
        with contextlib.suppress(LedgerError):
            if any(event.get("folder") == plan.folder for event in find_events(start.folder.path)):
                return
        self._add(lineage.REWIND, **plan.as_event())

    def note_end(self, reason: str | None, *, interruption: str | None) -> None:
        """Add the end of the training to the lineage, or its interruption."""
        if interruption is None:
            self._add(lineage.END, cause=reason)
        else:
            self._add(lineage.INTERRUPTION, cause=interruption)

    def note_scores(
        self,
        iteration: int,
        scores: Mapping[str, float],
        *,
        step: int,
        has_improved: bool,
        best: BestValidation | None,
        by_hand: Collection[str],
    ) -> None:
        """Add the scores of a validation to ledger and times; a replay compares them.

        Args:
            iteration: the one that the validation follows.
            scores: by name.
            step: the optimizer steps by then.
            has_improved: whether ``have_metrics_improved`` returned True.
            best: the best validation so far.
            by_hand: names of scores that were not summed over processes by Helios. One process has
                seen all samples, so there they are not told apart.
        """
        count = self._processes
        parts = dict.fromkeys(sorted(by_hand), count) if count > 1 else {}
        self._ledger.add_scores(iteration, scores, parts)
        if self._timing is not None:
            self._timing.add_scores(
                iteration,
                scores,
                step=step,
                has_improved=has_improved,
                best=best,
                by_hand=parts,
            )
        if self._follower is not None:
            self._follower.add_scores(iteration, scores, parts)

    def note_mismatch(self, text: str, hosts: Sequence[str]) -> None:
        """Add what an audit has found to the lineage."""
        self._add(lineage.MISMATCH, cause=scrub(text), hosts=sorted({*hosts}))

    def note_error(self, error: BaseException) -> None:
        """Add an error that ends the training to the lineage; a start that is refused adds none."""
        if not self._is_open:
            return
        self._add(lineage.ERROR, cause=_describe(error))

    def _add(self, event: str, **details: Any) -> None:
        if self._events is not None:
            self._events.add(event, **details)

    def mark(self) -> dict[str, Any] | None:
        """Return the size and hash of the ledger for a checkpoint."""
        return self._ledger.mark()

    def before_commit(self) -> None:
        """Wait until ledger and manifest are on the disk.

        Raises:
            OSError: if lines of the ledger cannot be written.
        """
        self._ledger.sync()
        if self._manifest is not None:
            self._manifest.settle()

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Add a committed checkpoint to the lineage."""
        self._add(lineage.SAVE, checkpoint=path.name, digest=sidecar.digest or None)

    def save_failed(self, path: Path, error: Exception) -> None:
        """Add a checkpoint that could not be written to the lineage."""
        self._add(lineage.FAILED_SAVE, checkpoint=path.name, cause=_describe(error))

    def close(self) -> None:
        """Write what waits, and close the files."""
        self._ledger.close()
        if self._timing is not None:
            self._timing.close()
        if self._manifest is not None:
            self._manifest.close()


def _describe(error: BaseException) -> str:
    """Return an error as text without secrets, whatever its own text is."""
    try:
        return scrub(f"{type(error).__name__}: {error}")[:_MOST_CHARACTERS]
    except Exception:
        return type(error).__name__


def make_evidence(
    start: Start,
    model: Model,
    replicas: Replicas,
    definition: Mapping[str, Any],
    *,
    describe: Callable[[], Mapping[str, Any]],
    options: Options,
) -> RunEvidence:
    """Return the evidence of a run; no file is opened yet.

    Args:
        start: where the run starts; it has a folder.
        model: the model.
        replicas: the replicas of the run; rank 0 writes.
        definition: what defines the run.
        describe: returns what is known of this start, by topic.
        options: what may differ from the last start.
    """
    assert start.folder is not None
    folder = start.folder.path
    after = None
    if start.loaded is not None and not start.is_branch:
        after = start.loaded.record.place[1]
    timing = None
    if replicas.rank == 0:
        run = hash_definition(definition, replicas)
        timing = Timing(
            folder,
            processes=replicas.num_processes,
            run=run,
            unscored=model.unscored,
            find_memory=find_peak_memory,
        )
    ledger = make_ledger(start, model, replicas, definition, level=options.ledger, timing=timing)
    manifest = events = None
    if replicas.rank == 0:
        events = Lineage(folder)
        manifest = RunManifest(
            folder,
            ledger.run,
            describe,
            after=after,
            allowed=options.allow_changes,
            has_stepped=lambda: ledger.writer.has_noted,
            is_strict=options.reproducibility == "strict",
        )
    return RunEvidence(
        ledger,
        manifest,
        events,
        timing=timing,
        processes=replicas.num_processes,
        num_known=len(start.changes),
    )

"""The recorders of a run in its folder: the ledger, and the file of its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from helios.checkpoint.sidecar import Sidecar
from helios.core.environment import describe_git
from helios.ledger import run_file
from helios.ledger.book import EVERY, Book
from helios.ledger.line import LineReceiver, hash_of
from helios.ledger.run_file import RunFile, host
from helios.ledger.writer import LedgerWriter
from helios.listeners import Recorder, Validated
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.start.origin import Origin
from helios.state.networks import name_buffers, name_weights

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
        unscored=model.unscored,
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
        state, best = validated.state, validated.best
        if validated.scores:
            self.file.add(
                run_file.VALIDATION,
                iteration=state.global_iteration,
                step=state.global_step,
                scores=validated.scores,
                has_improved=validated.has_improved or None,
                best=None if best is None else best.as_plain(),
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

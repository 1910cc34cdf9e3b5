"""Makes the ledger of a run, and joins its file to the loops and to the checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.checkpoint.record import Record
from helios.ledger.book import Book
from helios.ledger.line import hash_of
from helios.ledger.timing import Timing
from helios.ledger.writer import LedgerWriter
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.run_state.network_parts import name_weights


@dataclass
class RunLedger:
    """The ledger of a run.

    Attributes:
        run: hash of the run's definition.
        writer: what the loops see of it.
        book: its file, which rank 0 writes; ``None`` on other ranks.
        found: the mark in the checkpoint that the run continues from.
        after: the last iteration before this start.
    """

    run: str
    writer: LedgerWriter
    book: Book | None
    found: dict[str, Any] | None
    after: int

    def open(self) -> str | None:
        """Begin or continue the file, once nothing can refuse the start any more.

        Returns:
            Why the ledger of the checkpoint could not be continued; ``None`` if it was.
        """
        if self.book is None:
            return None
        self.book.open(self.found, after=self.after)
        return self.book.loss

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
        if self.book is not None:
            # After an error of an accelerator, its numbers cannot be read.
            with contextlib.suppress(RuntimeError):
                self.writer.settle()
            self.book.close()


def make_ledger(
    folder: Path,
    model: Model,
    replicas: Replicas,
    definition: Mapping[str, Any],
    *,
    record: Record | None,
    is_branch: bool,
    timing: Timing | None,
) -> RunLedger:
    """Return the ledger of a run; its file is not opened yet.

    Args:
        folder: the run's folder.
        model: the model.
        replicas: the replicas of the run; rank 0 writes.
        definition: what defines the run.
        record: the checkpoint to continue from; ``None`` for a new run.
        is_branch: whether the checkpoint is from another folder, which keeps its own ledger.
        timing: the times of the run; ``None`` on ranks other than 0.
    """
    run = hash_of({**definition, "num_replicas": replicas.num_replicas})
    book = Book(folder, run=run) if replicas.rank == 0 else None
    discovery = model.discovery
    writer = LedgerWriter(
        book,
        replicas.block,
        find_weights=lambda: name_weights(discovery.modules(), discovery.moved()[0]),
        find_optimizers=discovery.optimizers,
        attributes=vars(model),
        timing=timing,
    )
    found = None if record is None or is_branch else record.ledger
    return RunLedger(run, writer, book, found, after=0 if record is None else record.place[1])

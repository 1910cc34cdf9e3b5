"""Makes the ledger of a run, and joins its file to the loops and to the checkpoints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helios.core import rng
from helios.ledger.book import EVERY, Book
from helios.ledger.line import FULL, STEPS, hash_of
from helios.ledger.tensor_digests import TensorDigests, WeightDigests
from helios.ledger.timing import Timing
from helios.ledger.writer import LedgerWriter, LineReceiver
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search.resume_point import Start
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

"""Compares the lines of a repeated training with those of a ledger, one by one as they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from helios.core.text import with_step
from helios.errors import LedgerError
from helios.ledger.differences import (
    END,
    LineComparison,
    causes_of,
    describe_difference,
)
from helios.ledger.line import TAIL_BYTES, match_buffers
from helios.ledger.reading import parse_header, read_lines
from helios.ledger.validation_scores import RunScores, compare_scores, read_scores

_CHECKPOINT = "a checkpoint that was changed, or lacks state that it does not name"
_DEFINITION = "other options, seed or data than those that the ledger begins with"
_END_KEY = b',"end":1'


@dataclass
class Replay(LineComparison):
    """The result of ``Trainer.replay``; see also its base class.

    Attributes:
        ledger: the ledger of the run.
        checkpoint: the checkpoint that was loaded; ``None`` if the replay began with the run.
        stop: the last iteration to compare.
        has_ended: whether the end of the run was compared too.
    """

    ledger: Path
    checkpoint: Path | None
    stop: int
    has_ended: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether all lines and scores are equal."""
        return self.iteration is None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        own = {"ledger": str(self.ledger), "checkpoint": checkpoint}
        return {**vars(self), **own, "is_equal": self.is_equal}


@final
class LedgerFollower:
    """Takes the lines of a replay instead of a file, up to the first one that differs.

    Args:
        found: the result, which is filled in.
        meets_end: whether the replay must end where the run has ended.
        run: hash of the definition of the replay.
        unscored: names of scores that are not compared, besides those that the run has named.

    Attributes:
        found: the result so far.
        every: the number of steps between two hashes of the weights, as in the ledger.
        failure: what makes the ledger unusable; ``None`` if nothing does.

    Raises:
        LedgerError: if the ledger cannot be read.
    """

    def __init__(
        self, found: Replay, *, meets_end: bool, run: str, unscored: Collection[str] = ()
    ) -> None:
        lines = read_lines(found.ledger)
        header = parse_header(next(lines, b""), found.ledger)
        self.every: int = header["every"]
        self.failure: LedgerError | None = None
        self.found = found
        self._meets_end = meets_end
        self._lines = islice(lines, found.begins_after - header["after"], None)
        found.has_same_definition = header["run"] == run
        self._known = read_scores(found.ledger)
        self._own = RunScores(unscored=frozenset(unscored))
        self._num_compared = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to learn: a line differs, or the ledger cannot be used."""
        return self.found.iteration is not None or self.failure is not None

    @property
    def is_complete(self) -> bool:
        """Whether all lines were compared."""
        found = self.found
        return found.num_equal >= found.stop and (found.has_ended or not self._meets_end)

    def append(self, body: str) -> None:
        """Compare a line with the next one of the ledger.

        Args:
            body: a JSON object without its closing brace.
        """
        self._compare(body, is_end=False)

    def append_end(self, body: str, buffers: str) -> None:
        """Compare the last line; buffers only if the ledger has them.

        Args:
            body: as in :meth:`append`.
            buffers: the entry of the buffers, which comes last.
        """
        self._compare(body + buffers, is_end=True)

    def _compare(self, body: str, *, is_end: bool) -> None:
        found = self.found
        is_past = found.num_equal >= found.stop
        # The window of the last iteration may end after it.
        if self.is_over or (is_past and not is_end and not self._meets_end):
            return
        try:
            line = next(self._lines, b"")
            own, known = match_buffers(body.encode(), line[:-TAIL_BYTES])
            if own == known:
                found.add_line(own, is_end=is_end)
                found.has_ended |= is_end
            elif _END_KEY in line or not is_past:
                self._note(own, known, is_end=is_end, is_whole=line.endswith(b"\n"))
        except LedgerError as error:
            # Raised here, it would end the training as an error of the user's code.
            self.failure = error

    def add_scores(
        self, iteration: int, scores: Mapping[str, float], by_hand: Mapping[str, int]
    ) -> None:
        """Take the scores of a validation; they are compared once the lines before them are."""
        self._own.by_iteration[iteration] = dict(scores)
        self._own.by_hand[iteration] = dict(by_hand)

    def compare_scores(self, *, is_over: bool) -> None:
        """Compare the scores so far.

        Args:
            is_over: whether no validation follows, so that what was not compared can be named.
        """
        found, count = self.found, len(self._own.by_iteration)
        if self.failure is not None or (count == self._num_compared and not is_over):
            return
        self._num_compared = count
        last = found.num_equal if found.iteration is None else found.iteration
        scores = compare_scores(self._known, self._own, after=found.begins_after, last=last)
        if is_over or scores.iteration is not None:
            found.add_scores(scores)

    def _note(self, own: bytes, known: bytes, *, is_end: bool, is_whole: bool) -> None:
        """Note the first line that differs.

        Args:
            own: that of the replay, without its hash.
            known: that of the ledger, likewise.
            is_end: whether the replay ends with it.
            is_whole: whether the line of the ledger has an end.
        """
        found = self.found
        if not is_whole:
            place = with_step(found.num_equal, found.steps.get("num_equal"))
            raise LedgerError(
                f"The ledger {found.ledger} ended at iteration {place} while it was "
                "compared: another start of the run has cut it back. Replay again."
            )
        if is_end != (_END_KEY in known):
            found.iteration, found.what = found.num_equal + 1, [END]
            found.causes = causes_of(found)
        else:
            describe_difference(found, (known, str(found.ledger)), (own, "The replay"))
        if not found.has_same_definition:
            found.causes.insert(0, _DEFINITION)
        if found.checkpoint is not None and found.num_equal == found.begins_after:
            found.causes.append(_CHECKPOINT)

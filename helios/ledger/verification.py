"""Verifies a ledger: every line, their order, and that the checkpoints belong to it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.errors import LedgerError
from helios.ledger.book import RunScores, find_ledger, parse_header, read_all_lines
from helios.ledger.line import is_scores, stated_hash, unseal, write_float
from helios.ledger.run_file import read_run_file

if TYPE_CHECKING:
    from helios.checkpoint.sidecar import Sidecar


@dataclass
class LedgerStatus:
    """The result of :func:`verify`.

    Attributes:
        path: the ledger.
        num_iterations: lines of iterations that were read.
        begins_after: the last iteration before the first line: 0, except for a branch of another
            run, or if the ledger was switched on later or was lost.
        has_ended: whether the run has ended, not only been interrupted.
        num_scored: validations whose scores were compared with those of checkpoints.
        hash: the hash of the last line, which covers all lines.
        findings: what is wrong, line by line; empty if nothing is.
    """

    path: Path
    num_iterations: int = 0
    begins_after: int = 0
    has_ended: bool = False
    num_scored: int = 0
    hash: str = ""
    findings: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify(
    run: str | Path,
    sidecars: Mapping[str, Sidecar] | None = None,
    *,
    watch: Callable[[dict[str, Any]], object] | None = None,
) -> LedgerStatus:
    """Verify the ledger of a run.

    Args:
        run: the folder of the run, or its ledger.
        sidecars: those of the checkpoints beside it, by file name, the oldest first. Their places
            must be in the ledger, and their scores and digests those that the run has recorded; if
            the last one says that the run has finished, so must the ledger.
        watch: called with each line that follows from the one before it, except for the header.

    Returns:
        The status, with a finding for every line that was changed, removed, repeated or moved.

    Raises:
        LedgerError: if there is no ledger, or if it cannot be read.
    """
    path, sidecars = find_ledger(run), sidecars or {}
    status = LedgerStatus(path)
    reader = _Reader(status, watch)
    marks = {name: each.ledger for name, each in sidecars.items() if each.ledger is not None}
    places = {
        name: (mark["size"], mark["hash"], mark.get("tail", mark["hash"]))
        for name, mark in marks.items()
    }
    missing, size = set(places.values()), 0
    for number, data in enumerate(read_all_lines(path), 1):
        reader.read(number, data)
        size += len(data)
        missing.discard((size, reader.chain, reader.tail))
    if not reader.chain:
        raise LedgerError(f"The ledger {path} is empty, so there is nothing to verify.")
    status.hash = reader.chain
    for name, each in list(sidecars.items())[-1:]:
        if each.finished and name in marks and not status.has_ended and size <= places[name][0]:
            status.findings.append("the run has ended, but the last line does not say so")
    status.findings += [
        f"{name} belongs to another ledger, or to lines that are missing"
        for name, place in sorted(places.items())
        if place in missing
    ]
    status.findings += _check_digests(path.parent, sidecars)
    _check_scores(status, sidecars, reader.scores)
    return status


def _check_scores(
    status: LedgerStatus, sidecars: Mapping[str, Sidecar], recorded: RunScores
) -> None:
    """Compare the scores that checkpoints state with those that the run has recorded."""
    seen = set()
    for name, sidecar in sidecars.items():
        best = sidecar.best
        tables = {} if best is None else {best.iteration: best.scores}
        for iteration, table in {**tables, sidecar.iteration: sidecar.metrics}.items():
            own = recorded.by_iteration.get(iteration, {})
            shared = table.keys() & own.keys()
            seen |= {iteration} if shared else set()
            status.findings += [
                f"{name} has the score {key} {table[key]!r} of the validation after iteration "
                f"{iteration}, but the run has recorded {own[key]!r}"
                for key in sorted(shared)
                if write_float(table[key]) != write_float(own[key])
            ]
    status.num_scored = len(seen)


def _check_digests(folder: Path, sidecars: Mapping[str, Sidecar]) -> Iterator[str]:
    """Yield each checkpoint with another digest than when the run saved or loaded it."""
    known: dict[str, set[str]] = {}
    for event in read_run_file(folder):
        if "digest" in event:
            known.setdefault(str(event.get("checkpoint")), set()).add(event["digest"])
    for name, sidecar in sidecars.items():
        if sidecar.digest not in known.get(name, {sidecar.digest}):
            yield f"{name} is not the file that the run has saved: it was replaced"


class _Reader:
    """Reads line by line, and adds what is wrong to the status.

    Attributes:
        chain: the hash of the chain so far.
        tail: that of the line before, which may have scores, beside the chain.
        scores: those of validations.
    """

    def __init__(
        self, status: LedgerStatus, watch: Callable[[dict[str, Any]], object] | None
    ) -> None:
        self.chain = self.tail = ""
        self.scores = RunScores()
        self._status = status
        self._watch = watch
        self._number = self._iteration = 0

    def read(self, number: int, data: bytes) -> None:
        self._number = number
        if self._status.has_ended:
            self._status.findings.append(f"line {number} follows the end of the run")
        if is_scores(data):
            self._read_scores(data)
            return
        try:
            content, self.chain = unseal(data, self.chain)
        except LedgerError as error:
            self._note(str(error))
            self.chain = stated_hash(data)
            self._count(data)
            return
        finally:
            self.tail = self.chain
        try:
            self._take(data, content)
        except (ValueError, LookupError, TypeError, AttributeError, struct.error):
            self._note("lacks entries of a line of a ledger")

    def _read_scores(self, data: bytes) -> None:
        count = len(self.scores.by_iteration)
        try:
            _, self.tail = unseal(data, self.chain)
            after = self.scores.add(data)
        except LedgerError as error:
            self._note(str(error))
            return
        if after != self._iteration or len(self.scores.by_iteration) == count:
            self._note("has scores that do not belong there")

    def _take(self, data: bytes, content: dict[str, Any]) -> None:
        status = self._status
        if self._number == 1:
            header = parse_header(data, status.path)
            self._iteration = status.begins_after = header["after"]
            if header.get("lost"):
                status.findings.append(f"the lines up to iteration {self._iteration} are missing")
            return
        if "end" in content:
            status.has_ended = True
        else:
            _, iteration, _ = content["at"]
            if iteration != self._iteration + 1:
                self._note(f"is iteration {iteration}")
            self._iteration = iteration
            status.num_iterations += 1
        if self._watch is not None:
            self._watch(content)

    def _note(self, what: str) -> None:
        """Note what is wrong with the present line."""
        place = f"line {self._number}, after iteration {self._iteration}"
        self._status.findings.append(f"{place}, {what}")

    def _count(self, data: bytes) -> None:
        """Count a bad line as an iteration if it is still one, so that the next one follows."""
        head = data.partition(b"]")[0].split(b",")
        if data.startswith(b'{"at":[') and len(head) > 1 and head[1].isdigit():
            self._iteration = int(head[1])
            self._status.num_iterations += 1

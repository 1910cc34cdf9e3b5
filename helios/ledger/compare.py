"""Compares two runs: where they diverge, what differs there, and what was not compared.

A replay is compared in the same way, line by line as it creates them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, final

from helios.errors import LedgerError
from helios.ledger.book import RunScores, find_ledger, parse_header, read_lines, read_scores
from helios.ledger.line import TAIL_BYTES, LineReceiver, read_float, write_float
from helios.ledger.run_file import find_differences, read_run
from helios.text import count_text

ORDER, CONTENT, RATES = "order of the samples", "content of the batches", "learning rates"
NUMERICS, WEIGHTS, COUNTERS = "losses", "weights and optimizers", "counters"
END, SCORES, BUFFERS = "end of the run", "scores of the validation", "buffers"
_KEYS = (
    (RATES, ("lr",)),
    (NUMERICS, ("loss", "norm", "skipped")),
    (WEIGHTS, ("weights", "optimizer")),
)
_END = b',"end":1'
NO_BUFFERS = "buffers were not compared"


@dataclass(kw_only=True)
class LineComparison:
    """The result of a comparison of lines; the base of the results.

    Attributes:
        begins_after: the last iteration before the first compared one; usually 0.
        num_equal: the last iteration up to which both are equal.
        iteration: the first iteration that differs; ``None`` if there is none.
        what: the parts of it that differ, in the order in which an iteration computes them.
        details: the differing values of both runs, by name.
        has_same_definition: whether both runs have the same definition: options, data and seed.
        weights_at: the last iteration at which the weights of both runs were found to be equal;
            ``None`` if they were not compared.
        has_compared_buffers: whether the persistent buffers at the end of both runs were compared.
        num_scored: validations whose scores were found to be equal.
        not_compared: what was not compared, and why.
    """

    begins_after: int = 0
    num_equal: int = 0
    iteration: int | None = None
    what: list[str] = field(default_factory=list)
    details: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    has_same_definition: bool = True
    weights_at: int | None = None
    has_compared_buffers: bool = False
    num_scored: int = 0
    not_compared: list[str] = field(default_factory=list)

    @property
    def may_begin_earlier(self) -> bool:
        """Whether the first difference is not compared in each iteration, so it may be earlier."""
        return self.what[:1] in ([SCORES], [WEIGHTS], [BUFFERS])

    def add_line(self, body: bytes, *, is_end: bool) -> None:
        """Count a line that is equal in both runs, given without its hash."""
        self.num_equal += not is_end
        self.has_compared_buffers |= is_end
        # A loss may have the name of a digest.
        if b',"weights":"' in body and "weights" in _load(body):
            self.weights_at = self.num_equal

    def compare_scores(self, one: RunScores, other: RunScores) -> None:
        """Compare the scores where both runs have validated, and name what was not compared."""
        last = self.num_equal if self.iteration is None else self.iteration
        unscored = one.unscored | other.unscored
        sides = [
            {place: x for place, x in run.by_iteration.items() if self.begins_after < place <= last}
            for run in (one, other)
        ]
        lone: set[str] = set()
        self.num_scored = 0
        for place in sorted(sides[0].keys() & sides[1].keys()):
            left, right = sides[0][place], sides[1][place]
            lone |= (left.keys() ^ right.keys()) - unscored
            shared = [name for name in left if name in right and name not in unscored]
            names = [x for x in shared if write_float(left[x]) != write_float(right[x])]
            if names:
                pair = ({x: left[x] for x in names}, {x: right[x] for x in names})
                self._add_scores(place, pair)
                break
            self.num_scored += bool(shared)
        lone_places = sides[0].keys() ^ sides[1].keys()
        self.not_compared = [*self._name_rest()]
        if lone_places:
            self.not_compared.append(
                f"scores after {count_text(len(lone_places), 'iteration')} were not compared: only "
                "one of the runs has validated there"
            )
        reasons = dict.fromkeys(sorted(lone), "only one of the runs has it")
        reasons |= dict.fromkeys(sorted(unscored), "it is unscored")
        self.not_compared += [
            f"the score {name!r} was not compared: {why}" for name, why in reasons.items()
        ]

    def _add_scores(self, place: int, pair: tuple[Any, Any]) -> None:
        """Note the first validation whose scores differ."""
        if self.iteration is None or place < self.iteration:
            # What differs later and was found in lines that come rarely shows in the details.
            self.iteration, self.num_equal, self.what = place, place - 1, []
        if self.iteration == place and SCORES not in self.what:
            self.what.append(SCORES)
            self.details["scores"] = pair

    def _name_rest(self) -> Iterator[str]:
        """Yield what no line holds, or none of those that were compared."""
        if self.weights_at is None and WEIGHTS not in self.what:
            yield "weights were not compared"
        elif self.weights_at is not None and self.weights_at < self.num_equal:
            yield f"weights were not compared after iteration {self.weights_at}"
        if not self.has_compared_buffers:
            yield NO_BUFFERS


def _load(body: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(body + b"}")
    return content


@dataclass
class Difference(LineComparison):
    """The result of :func:`diff`; see also its base class.

    Attributes:
        first, second: the two ledgers.
        lengths: the last iteration of each ledger.
        have_ended: whether each ledger has the line of the end of its run.
        starts: the differences of the newest starts of both runs: both values, by name.
    """

    first: Path
    second: Path
    lengths: tuple[int, int] = (0, 0)
    have_ended: tuple[bool, bool] = (False, False)
    starts: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether both have the same scores and the same lines, from their first common one on."""
        is_as_long = self.lengths[0] == self.lengths[1]
        is_at_end = self.have_ended[0] is self.have_ended[1]
        return self.iteration is None and is_as_long and is_at_end


def diff(first: str | Path, second: str | Path) -> Difference:
    """Compare the ledgers of two runs line by line, and the scores where both have validated.

    Args:
        first: the folder of a run, or its ledger.
        second: the other run, likewise.

    Raises:
        LedgerError: if one of them is missing or damaged, or if they have no iteration in common.
    """
    found = Difference(find_ledger(first), find_ledger(second))
    left, right = _read_complete_lines(found.first), _read_complete_lines(found.second)
    heads = [
        parse_header(next(lines, b""), path)
        for lines, path in ((left, found.first), (right, found.second))
    ]
    found.has_same_definition = heads[0]["run"] == heads[1]["run"]
    begins = [head["after"] for head in heads]
    start = max(begins)
    found.begins_after = found.num_equal = start
    counts, ends = [start, start], [False, False]
    # A ledger that was lost begins later.
    pairs = zip_longest(
        islice(left, start - begins[0], None), islice(right, start - begins[1], None)
    )
    for pair in pairs:
        are_iterations = [data is not None and _END not in data for data in pair]
        counts = [count + is_one for count, is_one in zip(counts, are_iterations, strict=True)]
        ends = [end or _END in (data or b"") for end, data in zip(ends, pair, strict=True)]
        if found.iteration is not None or None in pair:
            continue
        one, other = (data[:-TAIL_BYTES] for data in pair)
        if one == other:
            found.add_line(one, is_end=not are_iterations[0])
        elif are_iterations[0] == are_iterations[1]:
            describe_difference(found, one, other, f"{found.first} or {found.second}")
    if start and start in counts:
        raise LedgerError(
            f"{found.first} and {found.second} have no iteration in common: they begin after "
            f"iteration {begins[0]} and {begins[1]}, and end at {counts[0]} and {counts[1]}."
        )
    found.compare_scores(read_scores(found.first), read_scores(found.second))
    found.lengths, found.have_ended = (counts[0], counts[1]), (ends[0], ends[1])
    starts = [read_run(path.parent) for path in (found.first, found.second)]
    if all(run.newest for run in starts):
        found.starts = find_differences(starts)
    return found


def _read_complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a ledger but one that is being written, which has no end yet."""
    return (data for data in read_lines(path) if data.endswith(b"\n"))


def describe_difference(found: LineComparison, one: bytes, other: bytes, ledgers: str) -> None:
    """Note the first iteration that differs, and in what.

    Args:
        found: what was found so far.
        one: the line of one run without its hash.
        other: that of the other one; both are lines of iterations, or of the end.
        ledgers: their names for messages.

    Raises:
        LedgerError: if one of the lines cannot be right.
    """
    found.iteration = found.num_equal + (_END not in one)
    try:
        left, right = _load(one), _load(other)
        _compare(found, left, right)
        is_next = left["at"][1] == right["at"][1] == found.iteration
    except (TypeError, ValueError, AttributeError, LookupError, struct.error):
        is_next = False
    if not is_next or not found.what:
        raise LedgerError(
            f"{ledgers} has a damaged line after iteration {found.num_equal}. `helios verify` "
            "names it."
        )


def _compare(found: LineComparison, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Note in what two lines differ; raises ``TypeError`` and the like if one is damaged."""
    data = [[*line.get("data", ()), None, None, None][:3] for line in (left, right)]
    if data[0][0] != data[1][0]:
        found.what.append(ORDER)
    if data[0][1:] != data[1][1:]:
        found.what.append(CONTENT)
    for what, keys in _KEYS:
        changed = [key for key in keys if left.get(key) != right.get(key)]
        for key in changed:
            pair = (left.get(key), right.get(key))
            # Those of weights are hashes.
            found.details[key] = pair if what == WEIGHTS else (_read(pair[0]), _read(pair[1]))
        if changed:
            found.what.append(what)
    if "buffers" in left:
        _compare_buffers(found, left["buffers"], right["buffers"])
    if left["at"] != right["at"]:
        found.what = found.what or [COUNTERS]
        found.details["at"] = (left["at"], right["at"])


def _compare_buffers(
    found: LineComparison, one: Mapping[str, str | None], other: Mapping[str, str | None]
) -> None:
    """Note which buffers differ in the last lines of two runs, which have digests of weights."""
    found.has_compared_buffers = True
    if WEIGHTS not in found.what:
        found.weights_at = found.num_equal
    names = [name for name in {**one, **other} if one.get(name, "") != other.get(name, "")]
    if names:
        found.what.append(BUFFERS)
        left, right = ({name: side.get(name) for name in names} for side in (one, other))
        found.details["buffers"] = (left, right)


def _read(value: Any) -> Any:
    """Return an entry of a line, with numbers instead of their bits."""
    if isinstance(value, dict):
        return {name: _read(digits) for name, digits in value.items()}
    if isinstance(value, list):
        return [_read(digits) for digits in value]
    return read_float(value) if isinstance(value, str) else value


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


@final
class LedgerFollower(LineReceiver):
    """Takes the lines of a replay instead of a file, up to the first one that differs.

    Args:
        found: the result, which is filled in.
        meets_end: whether the replay must end where the run has ended.
        run: hash of the definition of the replay.

    Attributes:
        found: the result so far.
        every: the number of steps between two hashes of the weights, as in the ledger.
        failure: what makes the ledger unusable; ``None`` if nothing does.

    Raises:
        LedgerError: if the ledger cannot be read.
    """

    def __init__(self, found: Replay, *, meets_end: bool, run: str) -> None:
        lines = read_lines(found.ledger)
        header = parse_header(next(lines, b""), found.ledger)
        self.every: int = header["every"]
        self.failure: LedgerError | None = None
        self.found = found
        self._meets_end = meets_end
        self._lines = islice(lines, found.begins_after - header["after"], None)
        found.has_same_definition = header["run"] == run
        self._known = read_scores(found.ledger)
        self._own = RunScores()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to learn: a line differs, or the ledger cannot be used."""
        return self.found.iteration is not None or self.failure is not None

    @property
    def is_complete(self) -> bool:
        """Whether all lines were compared."""
        found = self.found
        return found.num_equal >= found.stop and (found.has_ended or not self._meets_end)

    def append(self, bodies: Iterable[str]) -> None:
        """Compare lines with the next ones of the ledger.

        Args:
            bodies: JSON objects without their closing braces.
        """
        for body in bodies:
            self._compare(body.encode())

    def _compare(self, body: bytes) -> None:
        found, is_end = self.found, _END in body
        is_past = found.num_equal >= found.stop
        # The window of the last iteration may end after it.
        if self.is_over or (is_past and not is_end and not self._meets_end):
            return
        try:
            line = next(self._lines, b"")
            known = line[:-TAIL_BYTES]
            if body == known:
                found.add_line(body, is_end=is_end)
                found.has_ended |= is_end
            elif _END in line or not is_past:
                self._note(body, known, is_end=is_end, is_whole=line.endswith(b"\n"))
        except LedgerError as error:
            # Raised here, it would end the training as an error of the user's code.
            self.failure = error

    def append_scores(
        self, after: int, scores: Mapping[str, float], unscored: Collection[str]
    ) -> None:
        """Compare the scores of a validation; the lines before them were compared."""
        self._own.by_iteration[after] = scores
        self._own.unscored |= frozenset(unscored)
        self.compare_scores()

    def compare_scores(self) -> None:
        """Compare the scores so far, and name what was not compared."""
        if self.failure is None:
            self.found.compare_scores(self._known, self._own)

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
            raise LedgerError(
                f"The ledger {found.ledger} ended at iteration {found.num_equal} while it was "
                "compared: another start of the run has cut it back. Replay again."
            )
        if is_end != (_END in known):
            found.iteration, found.what = found.num_equal + 1, [END]
        else:
            describe_difference(found, known, own, str(found.ledger))

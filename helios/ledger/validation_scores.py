"""The scores of a run's validations, and whether those of two runs have the same bits."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helios.errors import LedgerError
from helios.ledger.book import parse_header, read_all_lines
from helios.ledger.line import is_scores, read_float, step_of, write_float
from helios.text import count_text


@dataclass
class RunScores:
    """The scores of a run.

    Attributes:
        by_iteration: the scores of each validation by name, by the iteration that it follows.
        by_hand: of each score that several processes have filled by hand, their number, likewise.
        unscored: names of scores that are not compared, as ``Model.unscored`` says.
        steps: optimizer steps at these iterations, as far as they are known.
    """

    by_iteration: dict[int, Mapping[str, float]] = field(default_factory=dict)
    by_hand: dict[int, Mapping[str, int]] = field(default_factory=dict)
    unscored: frozenset[str] = frozenset()
    steps: dict[int, int] = field(default_factory=dict)

    def add(self, data: bytes, step: int | None) -> int:
        """Add a line of scores; see :mod:`helios.ledger.line`.

        Args:
            data: the line.
            step: optimizer steps at its iteration, if they are known.

        Returns:
            The iteration that it follows.

        Raises:
            LedgerError: if the line has no scores.
        """
        try:
            content = json.loads(data)
            after = int(content["after"])
            scores = {name: read_float(digits) for name, digits in content["scores"].items()}
            by_hand = {name: int(count) for name, count in content.get("by_hand", {}).items()}
            self.unscored |= frozenset(content.get("unscored", ()))
        except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
            raise LedgerError("lacks what a line of scores has") from error
        self.by_iteration[after], self.by_hand[after] = scores, by_hand
        if step is not None:
            self.steps[after] = step
        return after


@dataclass
class ScoreComparison:
    """What a comparison of the scores of two runs has found.

    Attributes:
        num_equal: validations whose scores are equal, up to the first ones that differ.
        iteration: the iteration of these; ``None`` if none differ.
        step: optimizer steps at that iteration; ``None`` if unknown.
        details: the differing scores of both runs, by name.
        not_compared: what was not compared, and why.
    """

    num_equal: int = 0
    iteration: int | None = None
    step: int | None = None
    details: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    not_compared: list[str] = field(default_factory=list)


def read_scores(ledger: Path) -> RunScores:
    """Return the scores of the run that a ledger belongs to.

    Raises:
        LedgerError: if they cannot be read.
    """
    lines = read_all_lines(ledger)
    parse_header(next(lines, b""), ledger)
    found, before = RunScores(), b""
    for data in lines:
        if not is_scores(data):
            before = data
            continue
        # `verify` names a line that is wrong; one that is being written has no end.
        with contextlib.suppress(LedgerError):
            found.add(data, step_of(before))
    return found


def compare_scores(
    one: RunScores, other: RunScores, *, after: int = 0, last: float = math.inf
) -> ScoreComparison:
    """Compare the scores of two runs where both have validated.

    Args:
        one: those of one run.
        other: those of the other one.
        after: the iteration after which validations are compared.
        last: the iteration up to which they are.
    """
    found = ScoreComparison()
    unscored, steps = one.unscored | other.unscored, other.steps | one.steps
    sides = [
        {number: table for number, table in run.by_iteration.items() if after < number <= last}
        for run in (one, other)
    ]
    lone: set[str] = set()
    partial: dict[str, tuple[int, int]] = {}
    for number in sorted(sides[0].keys() & sides[1].keys()):
        left, right = sides[0][number], sides[1][number]
        lone |= (left.keys() ^ right.keys()) - unscored
        parts = _find_partial(one.by_hand.get(number, {}), other.by_hand.get(number, {}))
        partial |= parts
        exempt = unscored | parts.keys()
        shared = [name for name in left if name in right and name not in exempt]
        differing = [name for name in shared if write_float(left[name]) != write_float(right[name])]
        if differing and found.iteration is None:
            found.iteration, found.step = number, steps.get(number)
            found.details = (_pick(left, differing), _pick(right, differing))
        found.num_equal += bool(shared) and found.iteration is None
    lone_places = sides[0].keys() ^ sides[1].keys()
    if lone_places:
        found.not_compared.append(
            f"scores after {count_text(len(lone_places), 'iteration')} were not compared: only one "
            "of the runs has validated there"
        )
    found.not_compared += [
        f"the score {name!r} was not compared: only one of the runs has it" for name in sorted(lone)
    ]
    found.not_compared += [
        f"the score {name!r} was not compared: it is unscored" for name in sorted(unscored)
    ]
    found.not_compared += [
        f"the score {name!r} was not compared: it was filled by hand, on {counts[0]} and "
        f"{counts[1]} processes"
        for name, counts in sorted(partial.items())
        if name not in unscored
    ]
    return found


def _find_partial(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return what was filled by hand on different numbers of processes, with these numbers."""
    names = {**one, **other}
    counts = {name: (one.get(name, 1), other.get(name, 1)) for name in names}
    return {name: pair for name, pair in counts.items() if pair[0] != pair[1]}


def _pick(table: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    return {name: table[name] for name in names}

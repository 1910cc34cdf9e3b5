"""The pictures of runs: losses, learning rates, throughput and scores, of one run or of several.

A curve is kept small while the ledger is read: least, mean and largest number of each bucket. These
hold one iteration at first; whenever there are too many, each two are joined. Curves of one run
have the area between their least and largest numbers and the starts that resumed; those of several
lie over each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from helios.best import BestValidation
from helios.ledger.book import parse_header, read_lines
from helios.ledger.line import read_float
from helios.ledger.run_facts import RunFacts
from helios.ledger.timing import BEFORE, UNKNOWN
from helios.ledger.verification import LedgerStatus, verify
from helios.reports.document import (
    MOST_ROWS,
    Block,
    Chapter,
    Chart,
    Line,
    shorten,
    write_table,
    write_text,
)
from helios.text import number_text, with_step

_MOST, _CHUNK = 1_024, 4_096
# Sums of very large numbers stay finite.
_SCALE = 2.0**-64


class CurvePart(NamedTuple):
    """The numbers of some iterations.

    Attributes:
        place: the middle of the iterations.
        low, mean, high: of the finite numbers.
    """

    place: float
    low: float
    mean: float
    high: float


@final
class Curve:
    """Numbers by iteration, of which only a few buckets are kept.

    Attributes:
        first, last: the oldest and the newest iteration, with its number; ``None`` without one.
        num_infinite: how many numbers are not finite.
        first_infinite: the iteration of the first of them.
        last_step, first_infinite_step: optimizer steps at their ends; ``None`` if unknown.
    """

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.num_infinite = 0
        self.first_infinite: int | None = None
        self.last_step: int | None = None
        self.first_infinite_step: int | None = None
        self._begin: int | None = None
        self._width = 1
        self._size = 0
        self._buckets = _make_buckets(_MOST)
        self._waiting: list[tuple[int, float]] = []

    def add(self, iteration: int, number: float, step: int | None = None) -> None:
        """Add the number of an iteration; iterations must not decrease."""
        self.last, self.last_step = (iteration, number), step
        self.first = self.first or self.last
        if not math.isfinite(number):
            self.num_infinite += 1
            if self.first_infinite is None:
                self.first_infinite, self.first_infinite_step = iteration, step
            return
        self._waiting.append(self.last)
        if len(self._waiting) == _CHUNK:
            self._gather()

    @property
    def ends(self) -> tuple[float, float] | None:
        """The first and the last number; ``None`` without any."""
        return None if self.first is None or self.last is None else (self.first[1], self.last[1])

    def summarize(self) -> dict[str, Any]:
        """Return the curve in plain values: its ends, and its least and largest finite number."""
        parts = self.shrink(1)
        ends = (None, None) if self.ends is None else self.ends
        return {
            "first": ends[0],
            "last": ends[1],
            "iteration": None if self.last is None else self.last[0],
            "least": min((part.low for part in parts), default=None),
            "largest": max((part.high for part in parts), default=None),
            "num_infinite": self.num_infinite,
        }

    def _gather(self) -> None:
        """Put the numbers that wait into buckets."""
        if not self._waiting:
            return
        iterations, numbers = np.array(self._waiting).T
        self._waiting = []
        if self._begin is None:
            self._begin = int(iterations[0])
        # In a file that was changed, an iteration may be before the first one.
        distances = np.maximum(iterations.astype(np.int64) - self._begin, 0)
        while distances.max() // self._width >= _MOST:
            halves = _halve(self._buckets)
            self._buckets = np.hstack([halves, _make_buckets(_MOST - halves.shape[1])])
            self._width *= 2
        places = distances // self._width
        lows, sums, highs, counts = self._buckets
        np.minimum.at(lows, places, numbers)
        np.add.at(sums, places, numbers * _SCALE)
        np.maximum.at(highs, places, numbers)
        np.add.at(counts, places, 1.0)
        self._size = int(counts.nonzero()[0][-1]) + 1

    def shrink(self, most: int) -> list[CurvePart]:
        """Return the curve in at most so many buckets, those without a number left out.

        Args:
            most: the number of buckets; 0 for none.
        """
        self._gather()
        if not most or self._begin is None:
            return []
        buckets, width = self._buckets[:, : self._size], self._width
        while buckets.shape[1] > most:
            buckets, width = _halve(buckets), 2 * width
        return [
            CurvePart(
                self._begin + (number + 0.5) * width - 0.5,
                low,
                min(max(total / count / _SCALE, low), high),
                high,
            )
            for number, (low, total, high, count) in enumerate(buckets.T.tolist())
            if count
        ]


def _make_buckets(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return rows of least, scaled sum, largest and count, for buckets without a number."""
    return np.repeat([[math.inf], [0.0], [-math.inf], [0.0]], count, axis=1)


def _halve(buckets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Join each two buckets."""
    whole = np.hstack([buckets, _make_buckets(buckets.shape[1] % 2)])
    lows, sums, highs, counts = whole.reshape(4, -1, 2)
    return np.stack([lows.min(1), sums.sum(1), highs.max(1), counts.sum(1)])


@dataclass
class LedgerCurves:
    """The curves of a ledger.

    Attributes:
        begin, end: the first and the last iteration.
        epoch, step: the counters in the last line.
        losses: by name.
        rates: the learning rates, by place.
        norm: the norm of the gradients; ``None`` if none was computed.
        num_skipped: iterations that left an update out.
        digests: iteration with its step, hash of the weights and of the optimizers in the newest
            line with them.
        sources: where the learning rates that iterations have used are, as in ``Stretches.rates``.
        has_used_rates: whether all rates are those that iterations have used; otherwise some are
            those at their end.
    """

    begin: int = 1
    end: int = 0
    epoch: int = 0
    step: int = 0
    losses: dict[str, Curve] = field(default_factory=dict)
    rates: list[Curve] = field(default_factory=list)
    norm: Curve | None = None
    num_skipped: int = 0
    digests: tuple[str, str, str] | None = None
    sources: Sequence[Mapping[str, Any]] = ()
    has_used_rates: bool = True
    _ends: Sequence[str | None] = ()
    _source: str | Sequence[float] = UNKNOWN
    _num_sources: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of the ledger; raises ``ValueError`` and the like for another one."""
        self.epoch, iteration, self.step = line["at"]
        self.end = iteration
        if "weights" in line:
            place = with_step(iteration, self.step)
            self.digests = (place, line["weights"], line["optimizer"])
        for name, digits in line.get("loss", {}).items():
            if name not in self.losses:
                self.losses[name] = Curve()
            self._add(self.losses[name], digits)
        if "lr" in line:
            self._add_rates(iteration, line["lr"])
        if "norm" in line:
            self.norm = self.norm or Curve()
            self._add(self.norm, line["norm"])
        self.num_skipped += "skipped" in line

    def _add(self, curve: Curve, digits: str | None) -> None:
        if digits is not None:
            curve.add(self.end, read_float(digits), self.step)

    def _add_rates(self, iteration: int, ends: Sequence[str | None]) -> None:
        """Add the learning rates that an iteration has used."""
        before, self._ends = self._ends, ends
        while self._num_sources < len(self.sources):
            source = self.sources[self._num_sources]
            if source["iteration"] > iteration:
                break
            self._source = source["rates"]
            self._num_sources += 1
        self.has_used_rates &= self._source != UNKNOWN
        used: Sequence[str | float | None] = before if self._source == BEFORE else ends
        if not isinstance(self._source, str):
            # The list is that of a single iteration, and a line follows.
            used = self._source
        for number, rate in enumerate(used):
            if number == len(self.rates):
                self.rates.append(Curve())
            if isinstance(rate, str):
                rate = read_float(rate)
            if rate is not None:
                self.rates[number].add(iteration, rate, self.step)


def read_curves(
    path: Path, sources: Sequence[Mapping[str, Any]] = ()
) -> tuple[LedgerCurves, LedgerStatus]:
    """Read the curves of a ledger, and verify it; lines that are not good are left out.

    Args:
        path: the ledger.
        sources: where the learning rates that iterations have used are.

    Raises:
        LedgerError: if it cannot be read, or is none.
    """
    after = parse_header(next(read_lines(path), b""), path)["after"]
    found = LedgerCurves(begin=after + 1, end=after, sources=sources)
    return found, verify(path, watch=found.add)


NORM = "gradient norm before clipping"
LOSSES, RATES, THROUGHPUT, SCORES = "Losses", "Learning rate", "Throughput", "Scores"
TOPICS = (LOSSES, RATES, THROUGHPUT, SCORES)
"""What there are curves of."""
_MOST_CHARTS = 40
_MOST_LINES = 16
_MARKS = "Vertical lines mark starts that resumed; those in red follow a kill."
# Lines over each other can be told apart only without the noise of single iterations.
_MOST_OVER = 200


@dataclass
class RunCurves:
    """What there is to draw of a run.

    Attributes:
        run: what is known of it.
        curves: those of its ledger; ``None`` without one.
        status: what the verification of the ledger has found; ``None`` without one.
        throughput: iterations per second.
        scores: by name.
    """

    run: RunFacts
    curves: LedgerCurves | None = None
    status: LedgerStatus | None = None
    throughput: Curve = field(default_factory=Curve)
    scores: dict[str, Curve] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunFacts) -> RunCurves:
        """Read all curves of a run.

        Raises:
            LedgerError: if its ledger cannot be read.
        """
        found = cls(run)
        if run.ledger is not None:
            found.curves, found.status = read_curves(run.ledger, run.times.rates)
        for line in run.times.lines:
            if own_seconds(line) > 0:
                found.throughput.add(line["iteration"], line["iterations"] / own_seconds(line))
        for name, values in run.find_scores().items():
            curve = found.scores.setdefault(name, Curve())
            for iteration, score in values:
                curve.add(iteration, score)
        return found

    @property
    def fingerprint(self) -> str | None:
        """The hash of the last line of the ledger; ``None`` without one."""
        return None if self.status is None else self.status.hash

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last iteration."""
        if self.curves is not None:
            return self.curves.begin, self.curves.end
        places = [line["iteration"] for line in (*self.run.times.lines, *self.run.times.scores)]
        return 1.0, max(places, default=1)

    def list_curves(self) -> dict[str, dict[str, Curve]]:
        """Return all curves by topic and title."""
        found: dict[str, dict[str, Curve]] = {topic: {} for topic in TOPICS}
        if self.curves is not None:
            rates = self.curves.rates
            found[LOSSES] |= self.curves.losses
            if self.curves.norm is not None:
                found[LOSSES][NORM] = self.curves.norm
            for number, curve in enumerate(rates, 1):
                found[RATES]["learning rate" + f", group {number}" * (len(rates) > 1)] = curve
        if self.throughput.last is not None:
            found[THROUGHPUT]["iterations per second"] = self.throughput
        found[SCORES] |= self.scores
        return found

    @property
    def marks(self) -> list[tuple[int, bool]]:
        """Iterations after which the run was resumed, and whether it was killed before."""
        return [
            (attempt.iteration, before.was_killed)
            for before, attempt in itertools.pairwise(self.run.attempts)
            # One that had no checkpoint yet began anew.
            if attempt.iteration
        ][:MOST_ROWS]

    def show(self, topic: str, points: int) -> Iterator[Block]:
        """Yield what there is to say of a topic, and its curves.

        Args:
            topic: one of :data:`TOPICS`.
            points: the most points of each line; 0 for charts without lines.
        """
        yield from self._introduce[topic](self)
        curves = self.list_curves()[topic]
        for name, curve in itertools.islice(curves.items(), _MOST_CHARTS):
            line = _line(curve, points, has_band=True)
            yield Chart(shorten(name), [line], self.span, self.marks, _describe_curve(curve))
        yield from _list_rest(list(curves))

    def _say_losses(self) -> Iterator[Block]:
        if self.curves is None:
            yield write_text("There is no ledger, so the losses are unknown.")
            return
        if self.curves.losses:
            yield write_text(
                "The line is the mean of each group of iterations, the area around it their least "
                f"and largest loss. {_MARKS}"
            )
        else:
            yield write_text("The run has set no losses (loss_items).")
        if self.curves.norm is None:
            yield write_text("No gradient norm: the training does not clip by norm (clip_norm).")

    def _say_rates(self) -> Iterator[Block]:
        if self.curves is None:
            yield write_text("There is no ledger, so the learning rates are unknown.")
        elif not self.curves.rates:
            yield write_text("The run has no optimizer with a learning rate.")
        elif not self.curves.has_used_rates:
            yield write_text(
                "Some of these rates are those at the end of an iteration, because the run has not "
                "recorded which ones its updates have used: with a scheduler that steps after each "
                "update, they are those of the next one."
            )

    def _say_throughput(self) -> Iterator[Block]:
        lines = [line for line in self.run.times.lines if own_seconds(line) > 0]
        if not lines:
            yield write_text("There are no times, so the throughput is unknown.")
            return
        mean = sum(line["iterations"] for line in lines) / sum(map(own_seconds, lines))
        # Earlier versions did not note how long validations took.
        knows_pauses = all("run" in start for start in self.run.times.starts)
        what = "with saves, without validations" if knows_pauses else "with validations and saves"
        yield write_text(f"On average {number_text(mean)} iterations per second, {what}. {_MARKS}")

    def _say_scores(self) -> Iterator[Block]:
        scores, best = self.run.find_scores(), self.run.find_best()
        if not scores:
            yield write_text("The run has recorded no scores of validations.")
            return
        rows, steps = [], self.run.find_steps()
        for name, values in scores.items():
            iteration, last = values[-1]
            place = with_step(iteration, steps.get(iteration))
            row = [shorten(name), f"{number_text(last)} (iteration {place})"]
            if best is not None:
                score = best.scores.get(name)
                at = f" (iteration {with_step(best.iteration, best.step)})"
                row.append("-" if score is None else number_text(score) + at)
            rows.append(row)
        head = ["score", "last validation"]
        yield write_table(head if best is None else [*head, "best validation"], rows[:MOST_ROWS])
        if best is not None:
            yield write_text(_explain(best))

    _introduce: ClassVar[Mapping[str, Callable[[RunCurves], Iterator[Block]]]] = {
        LOSSES: _say_losses,
        RATES: _say_rates,
        THROUGHPUT: _say_throughput,
        SCORES: _say_scores,
    }


def _describe_curve(curve: Curve) -> str:
    """Return the last number of a curve, and how many are not finite, in sentences."""
    if curve.last is None:
        return ""
    iteration, number = curve.last
    note = f"Last: {number_text(number)} at iteration {with_step(iteration, curve.last_step)}."
    if curve.first_infinite is not None:
        place = with_step(curve.first_infinite, curve.first_infinite_step)
        note += f" {curve.num_infinite:,} values are not finite, the first at iteration {place}."
    return note


def own_seconds(line: Mapping[str, Any]) -> float:
    """Return the time of the iterations of a stretch, without what paused them."""
    return float(line["seconds"] - line.get("paused", 0.0))


def draw_over(courses: Mapping[str, RunCurves], points: int) -> Iterator[Chapter]:
    """Yield a chapter for each topic, with the curves of all runs over each other.

    Args:
        courses: the runs, by name.
        points: the most points of each line; 0 for charts without lines.
    """
    spans = [course.span for course in courses.values()]
    span = min(first for first, _ in spans), max(last for _, last in spans)
    shown = dict(itertools.islice(courses.items(), _MOST_LINES))
    curves = {name: course.list_curves() for name, course in shown.items()}
    for topic in TOPICS:
        titles = dict.fromkeys(title for found in curves.values() for title in found[topic])
        blocks: list[Block] = [
            Chart(
                shorten(title),
                [
                    _line(found[topic][title], min(points, _MOST_OVER), name=shorten(name, 80))
                    for name, found in curves.items()
                    if title in found[topic]
                ],
                span,
            )
            for title in itertools.islice(titles, _MOST_CHARTS)
        ]
        blocks += _list_rest(list(titles))
        if len(courses) > _MOST_LINES:
            blocks.append(write_text(f"Drawn are the first {_MOST_LINES} of {len(courses)} runs."))
        yield Chapter(topic, blocks or [write_text("The runs have recorded none.")])


def _list_rest(titles: Sequence[str]) -> list[Block]:
    rest = ", ".join(titles[_MOST_CHARTS:])
    return (
        [write_text(shorten(f"Without a chart, because there are too many: {rest}."))]
        if rest
        else []
    )


def _line(curve: Curve, points: int, *, name: str = "", has_band: bool = False) -> Line:
    buckets = curve.shrink(points)
    is_wide = has_band and any(bucket.low < bucket.high for bucket in buckets)
    return Line(
        [(bucket.place, bucket.mean) for bucket in buckets],
        [(bucket.place, bucket.low, bucket.high) for bucket in buckets] if is_wide else (),
        name=name,
        ends=curve.ends,
    )


def _explain(best: BestValidation) -> str:
    """Return what decides which validation is the best."""
    if best.metric is None:
        text = "The best one is the last for which have_metrics_improved returned True"
    else:
        side = "smallest" if best.mode == "min" else "largest"
        text = f"The best one has the {side} finite {best.metric}, the earlier one at a tie"
    rest = f"; those until iteration {best.since} are unknown" if best.since else ""
    return f"{text}{rest}."

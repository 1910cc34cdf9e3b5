"""Curves of a ledger, kept small while it is read: least, mean and largest number of each bucket.

Buckets hold one iteration at first. Whenever there are too many, each two are joined.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from helios.core.text import with_step
from helios.errors import LedgerError
from helios.ledger.line import TAIL_BYTES, drop_buffers, is_scores, read_float, stated_hash
from helios.ledger.reading import parse_header, read_lines
from helios.ledger.timing import BEFORE, UNKNOWN
from helios.ledger.verification import LedgerStatus, verify

_MOST, _CHUNK = 1_024, 4_096
# Sums of very large numbers stay finite.
_SCALE = 2.0**-64
_BLOCK = 1 << 18
_Found = TypeVar("_Found")


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


def read_last_losses(path: Path) -> dict[str, float]:
    """Return the losses of the last iteration of a ledger, from its end; empty without any.

    Raises:
        LedgerError: if the file cannot be read.
    """

    def read(line: dict[str, Any]) -> dict[str, float]:
        return {name: read_float(x) for name, x in line["loss"].items() if x is not None}

    return _find_last(path, read) or {}


def read_last_iteration(path: Path) -> int | None:
    """Return the last iteration of a ledger, from its end; ``None`` without any.

    Raises:
        LedgerError: if the file cannot be read.
    """
    return _find_last(path, lambda line: int(line["at"][1]))


def _find_last(path: Path, read: Callable[[dict[str, Any]], _Found]) -> _Found | None:
    """Return what is read of the last line that has it, among some at the end."""
    lines = _read_chain_backwards(path)
    for data in islice(lines, _MOST):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, struct.error):
            return read(json.loads(data))
    return None


def read_last_line(path: Path) -> bytes:
    """Return the last line of a ledger's chain, with its end.

    Raises:
        LedgerError: if the file cannot be read.
    """
    return next(_read_chain_backwards(path), b"")


def read_course(path: Path) -> bytes:
    """Return the end of a ledger without the buffers: equal for equal courses of training.

    Raises:
        LedgerError: if the file cannot be read.
    """
    last, before, *_ = (*islice(_read_chain_backwards(path), 2), b"", b"")
    return stated_hash(before).encode() + drop_buffers(last[:-TAIL_BYTES])


def _read_chain_backwards(path: Path) -> Iterator[bytes]:
    return (data for data in _read_backwards(path) if not is_scores(data))


def _read_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a ledger from the last to the first."""
    try:
        with path.open("rb") as handle:
            place, data = handle.seek(0, 2), b""
            while place > 0:
                begin = max(0, place - _BLOCK)
                handle.seek(begin)
                # The first line may begin in the block before.
                data, *lines = (handle.read(place - begin) + data).splitlines(keepends=True)
                place = begin
                yield from reversed(lines)
    except OSError as error:
        raise LedgerError(f"The ledger {path} cannot be read: {error}.") from error
    if data:
        yield data

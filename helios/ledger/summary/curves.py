"""Curves of a ledger, kept small while it is read: least, mean and largest number of each bucket.

Buckets hold one iteration at first. Whenever there are too many, each two are joined.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from helios.errors import LedgerError
from helios.ledger.line import read_float
from helios.ledger.reading import parse_header, read_lines

_MOST = 1_024
_TAIL = 1 << 18


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

    Args:
        begin: the first iteration.

    Attributes:
        last: the newest iteration with its number; ``None`` without one.
        num_infinite: how many numbers are not finite.
        first_infinite: the iteration of the first of them.
    """

    def __init__(self, begin: int) -> None:
        self.last: tuple[int, float] | None = None
        self.num_infinite = 0
        self.first_infinite: int | None = None
        self._begin = begin
        self._width = 1
        # Least, sum, largest and count; a count of zero for a bucket without a number.
        self._buckets: list[list[float]] = []

    def add(self, iteration: int, number: float) -> None:
        """Add the number of an iteration; iterations must not decrease."""
        self.last = (iteration, number)
        if not math.isfinite(number):
            self.num_infinite += 1
            self.first_infinite = self.first_infinite or iteration
            return
        while (place := (iteration - self._begin) // self._width) >= _MOST:
            self._buckets, self._width = _halve(self._buckets), 2 * self._width
        buckets = self._buckets
        while len(buckets) <= place:
            buckets.append([math.inf, 0.0, -math.inf, 0])
        bucket = buckets[place]
        if number < bucket[0]:
            bucket[0] = number
        if number > bucket[2]:
            bucket[2] = number
        bucket[1] += number
        bucket[3] += 1

    def shrink(self, most: int) -> list[CurvePart]:
        """Return the curve in at most so many buckets, those without a number left out.

        Args:
            most: the number of buckets; 0 for none.
        """
        if not most:
            return []
        buckets, width = self._buckets, self._width
        while len(buckets) > most:
            buckets, width = _halve(buckets), 2 * width
        return [
            CurvePart(
                self._begin + (number + 0.5) * width - 0.5,
                low,
                # The sum of very large numbers may be infinite, and their mean is not.
                min(max(total / count, low), high),
                high,
            )
            for number, (low, total, high, count) in enumerate(buckets)
            if count
        ]


def _halve(buckets: list[list[float]]) -> list[list[float]]:
    return [_join(buckets[place : place + 2]) for place in range(0, len(buckets), 2)]


def _join(pair: list[list[float]]) -> list[float]:
    lows, sums, highs, counts = zip(*pair, strict=True)
    return [min(lows), sum(sums), max(highs), sum(counts)]


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
        digests: iteration, hash of the weights and of the optimizers in the newest line with them.
        num_damaged: lines that cannot be read.
    """

    begin: int = 1
    end: int = 0
    epoch: int = 0
    step: int = 0
    losses: dict[str, Curve] = field(default_factory=dict)
    rates: list[Curve] = field(default_factory=list)
    norm: Curve | None = None
    num_skipped: int = 0
    digests: tuple[int, str, str] | None = None
    num_damaged: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of the ledger; raises ``ValueError`` and the like if it is damaged."""
        self.epoch, iteration, self.step = line["at"]
        self.end = iteration
        if "weights" in line:
            self.digests = (iteration, line["weights"], line["optimizer"])
        for name, digits in line.get("loss", {}).items():
            if name not in self.losses:
                self.losses[name] = Curve(self.begin)
            _add(self.losses[name], iteration, digits)
        for number, digits in enumerate(line.get("lr", ())):
            if number == len(self.rates):
                self.rates.append(Curve(self.begin))
            _add(self.rates[number], iteration, digits)
        if "norm" in line:
            self.norm = self.norm or Curve(self.begin)
            _add(self.norm, iteration, line["norm"])
        self.num_skipped += "skipped" in line


def _add(curve: Curve, iteration: int, digits: str | None) -> None:
    if digits is not None:
        curve.add(iteration, read_float(digits))


def read_curves(path: Path) -> LedgerCurves:
    """Read the curves of a ledger; lines that are damaged are counted, and left out.

    Raises:
        LedgerError: if it cannot be read, or is none.
    """
    lines = read_lines(path)
    header = parse_header(next(lines, b""), path)
    found = LedgerCurves(begin=header["after"] + 1, end=header["after"])
    for line in _parse(lines, found):
        try:
            found.add(line)
        except (ValueError, LookupError, TypeError, AttributeError, struct.error):
            found.num_damaged += 1
    return found


def _parse(lines: Iterable[bytes], found: LedgerCurves) -> Iterator[dict[str, Any]]:
    for data in lines:
        try:
            yield json.loads(data)
        except ValueError:
            found.num_damaged += 1


def read_last_losses(path: Path) -> dict[str, float]:
    """Return the losses of the last iteration of a ledger, from its end; empty without any.

    Raises:
        LedgerError: if the file cannot be read.
    """
    for data in reversed(_read_tail(path)):
        try:
            losses = json.loads(data).get("loss")
            if losses:
                return {name: read_float(x) for name, x in losses.items() if x is not None}
        except (ValueError, AttributeError, struct.error):
            continue
    return {}


def read_last_iteration(path: Path) -> int | None:
    """Return the last iteration of a ledger, from its end; ``None`` without any.

    Raises:
        LedgerError: if the file cannot be read.
    """
    for data in reversed(_read_tail(path)):
        try:
            return int(json.loads(data)["at"][1])
        except (ValueError, LookupError, TypeError):
            continue
    return None


def read_last_line(path: Path) -> bytes:
    """Return the last line of a ledger, with its end.

    Raises:
        LedgerError: if the file cannot be read.
    """
    lines = _read_tail(path)
    return lines[-1] if lines else b""


def _read_tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - _TAIL))
            return handle.read().splitlines(keepends=True)
    except OSError as error:
        raise LedgerError(f"The ledger {path} cannot be read: {error}.") from error

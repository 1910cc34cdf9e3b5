"""Means of several runs, differences of pairs, and parts of the variance."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PROBABILITY = 0.975
# The squares of larger numbers, and their sums, are not finite.
_LARGEST = 1e150


def is_usable(value: float) -> bool:
    """Return whether a number is finite, and so small that its deviation is finite, too."""
    return abs(value) <= _LARGEST


@dataclass(frozen=True)
class Estimate:
    """What several runs say of a number.

    Attributes:
        values: the usable number of each run, by its name.
        mean: their mean.
        deviation: their standard deviation, with n - 1; ``None`` for one run.
        interval: the 95% interval of the mean by Student's t; ``None`` for one run.
    """

    values: Mapping[str, float]
    mean: float
    deviation: float | None = None
    interval: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        interval = None if self.interval is None else list(self.interval)
        return {**vars(self), "n": len(self.values), "interval": interval}


def estimate(values: Mapping[str, float]) -> Estimate | None:
    """Return mean, deviation and interval of usable numbers; ``None`` without any."""
    return _estimate({name: value for name, value in values.items() if is_usable(value)})


def _estimate(values: Mapping[str, float]) -> Estimate | None:
    if not values:
        return None
    mean, count = statistics.fmean(values.values()), len(values)
    if count == 1:
        return Estimate(values, mean)
    deviation = statistics.stdev(values.values())
    half = find_quantile(_PROBABILITY, count - 1) * deviation / math.sqrt(count)
    return Estimate(values, mean, deviation, (mean - half, mean + half))


def subtract(
    first: Mapping[Hashable, float], second: Mapping[Hashable, float], names: Mapping[Hashable, str]
) -> Estimate | None:
    """Return the estimate of the differences of pairs, first minus second, by common key.

    Pairs of which a number is not usable are left out.
    """
    pairs = {names[key]: (first[key], second[key]) for key in first if key in second}
    return _estimate(
        {name: x - y for name, (x, y) in pairs.items() if is_usable(x) and is_usable(y)}
    )


@dataclass(frozen=True)
class Parts:
    """The parts of the variance in a crossed design.

    Attributes:
        variances: the variance that each factor explains, by name; negative estimates are zero.
        rest: what remains: interactions of factors, and chance.
    """

    variances: Mapping[str, float]
    rest: float

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"variances": dict(self.variances), "rest": self.rest}


def find_crossing_fault(levels: Sequence[tuple[Hashable, ...]]) -> str | None:
    """Return why a design is not crossed; ``None`` if it is.

    Args:
        levels: for each run, the level of each factor.
    """
    sizes = [len(set(column)) for column in zip(*levels, strict=True)]
    counts, num_cells = Counter(levels), math.prod(sizes)
    if len(counts) < num_cells or len(set(counts.values())) > 1:
        return (
            f"the design is not crossed: {len(levels)} runs have {len(counts)} of {num_cells} "
            "combinations, or some more often than others"
        )
    freedom = len(levels) - 1 - sum(size - 1 for size in sizes)
    return None if freedom > 0 else "there are too few runs"


def split_variance(
    factors: Sequence[str], levels: Sequence[tuple[Hashable, ...]], values: Sequence[float]
) -> Parts:
    """Return the parts of the variance, by analysis of variance with random effects.

    Args:
        factors: the name of each factor.
        levels: for each run, the level of each factor; crossed.
        values: the number of each run; usable.
    """
    mean, count = statistics.fmean(values), len(values)
    rest = math.fsum((value - mean) ** 2 for value in values)
    freedom = count - 1
    squares = {}
    for place, factor in enumerate(factors):
        groups: dict[Hashable, list[float]] = {}
        for level, value in zip(levels, values, strict=True):
            groups.setdefault(level[place], []).append(value)
        size = count // len(groups)
        total = size * math.fsum((statistics.fmean(group) - mean) ** 2 for group in groups.values())
        squares[factor] = (total / (len(groups) - 1), size)
        rest -= total
        freedom -= len(groups) - 1
    rest = max(0.0, rest / freedom)
    return Parts(
        {factor: max(0.0, (square - rest) / size) for factor, (square, size) in squares.items()},
        rest,
    )


def cumulate(t: float, freedom: int) -> float:
    """Return the probability of at most ``t``, by the finite series for whole degrees of freedom.

    See Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    Example:
        >>> cumulate(0.0, 3)
        0.5
    """
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for number in range(1 + is_odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    share = math.sin(angle) * total
    if is_odd:
        share = 2 / math.pi * (angle + share)
    return 0.5 + share / 2


def find_quantile(probability: float, freedom: int) -> float:
    """Return the number that is exceeded with the remaining probability.

    Args:
        probability: from 0.5 to less than 1.
        freedom: the degrees of freedom, at least 1.

    Example:
        >>> round(find_quantile(0.975, 4), 3)
        2.776
    """
    low, high = 0.0, 1.0
    while cumulate(high, freedom) < probability:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        if cumulate(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high

"""Student's t distribution, for intervals of means."""

from __future__ import annotations

import math


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

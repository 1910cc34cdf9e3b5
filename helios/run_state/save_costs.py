"""What it may cost to save plain values, so that many small saves do not slow a training down."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import final

from helios.protocols import Clock, Meter

SHARE = 0.05
FLOOR = 0.05
"""Seconds that a place may always take."""


@final
class Costs:
    """Decides which places are too expensive to be saved in each checkpoint.

    A place costs what it takes to look at it and, where it has changed, to copy and to encode it.
    It may take 5 % of the longest time between two captures so far (at the first: since the
    baseline), and 50 ms in any case. It is given up when two captures in a row have taken more,
    since a single slow one may be the machine's fault. It is looked at again once the longest time
    has grown enough for its cost; so a place that was saved once is only given up when it gets
    slower.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock()
        self._longest = 0.0
        self._looks: dict[str, tuple[float, float]] = {}
        self._now: dict[str, float] = {}
        self._agreed: Mapping[str, float] | None = None

    def begin(self) -> Mapping[str, float]:
        """Begin a capture; returns the seconds of each place that is left out of it."""
        self._longest = max(self._longest, self._clock() - self._last)
        return self.too_slow() if self._agreed is None else self._agreed

    def end(self) -> None:
        """End the baseline or a capture: the time until the next one begins here."""
        for place, seconds in self._now.items():
            _, before = self._looks.get(place, (0.0, 0.0))
            self._looks[place] = before, seconds
        self._now = {}
        self._agreed = None
        self._last = self._clock()

    def too_slow(self) -> dict[str, float]:
        """Return the seconds of each place that this process would leave out now."""
        limit = max(FLOOR, SHARE * max(self._longest, self._clock() - self._last))
        return {place: seconds for place in self._looks if (seconds := self.seconds(place)) > limit}

    def agree(self, left_out: Mapping[str, float]) -> None:
        """Leave these places out of the next capture, as all processes of the run do."""
        self._agreed = left_out

    def seconds(self, place: str) -> float:
        """Return how long a place takes: the less of its last two captures."""
        return min(self._looks.get(place, (0.0,)))

    def time(self) -> float:
        """Return the present time."""
        return self._clock()

    def add(self, place: str, seconds: float) -> None:
        """Count seconds of the present capture for a place."""
        self._now[place] = self._now.get(place, 0.0) + seconds

    def meter(self, place: str) -> Meter:
        """Return what counts seconds for a place that the last capture takes after its end."""
        return partial(self._charge, place)

    def _charge(self, place: str, seconds: float) -> None:
        before, last = self._looks.get(place, (0.0, 0.0))
        self._looks[place] = before, last + seconds

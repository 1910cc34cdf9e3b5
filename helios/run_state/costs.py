"""What it may cost to look for changes, so that many small saves do not slow a training down."""

from __future__ import annotations

from typing import final

from helios.protocols import Clock

SHARE = 0.05
FLOOR = 0.05
"""Seconds that looking at a place may always take."""


@final
class Costs:
    """Decides which places are too expensive to be looked at for each checkpoint.

    A place may take 5 % of the longest time between two captures so far (at the first: since the
    baseline), and 50 ms in any case. It is given up when two looks in a row have taken more, since
    a single slow one may be the machine's fault. It is looked at again once the longest time has
    grown enough for its cost; so a place that was saved once is only given up when it gets slower.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock()
        self._longest = 0.0
        self._looks: dict[str, tuple[float, float]] = {}
        self._now: dict[str, float] = {}

    def begin(self) -> None:
        """Begin a capture."""
        self._longest = max(self._longest, self._clock() - self._last)

    def end(self) -> None:
        """End the baseline or a capture: the time until the next one begins here."""
        for place, seconds in self._now.items():
            _, before = self._looks.get(place, (0.0, 0.0))
            self._looks[place] = before, seconds
        self._now = {}
        self._last = self._clock()

    def can_afford(self, place: str) -> bool:
        """Return whether a place may be looked at."""
        return self.seconds(place) <= max(FLOOR, SHARE * self._longest)

    def seconds(self, place: str) -> float:
        """Return how long a place takes: the less of its last two looks."""
        return min(self._looks.get(place, (0.0,)))

    def time(self) -> float:
        """Return the present time."""
        return self._clock()

    def add(self, place: str, begin: float) -> None:
        """Count the time since ``begin`` for a place."""
        self._now[place] = self._now.get(place, 0.0) + self._clock() - begin

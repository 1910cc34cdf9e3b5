"""Limits what saving plain values may cost, so that many small saves do not slow a training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import final

from helios.protocols import Clock, Meter

SHARE = 0.05
FLOOR = 0.05
"""Seconds that a path may always take."""


@final
class Costs:
    """Decides which paths are too expensive to save in each checkpoint.

    The cost of a path is the time to compare it and, if it has changed, to copy and encode it. It
    may take 5 % of the longest time between two captures so far (for the first one: since the
    baseline), and at least 50 ms. It is left out after two captures in a row took more, because a
    single slow one may be due to the machine. It is compared again once the longest time has grown
    enough for its cost; so a path that was saved once is only left out if it becomes slower.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock()
        self._longest = 0.0
        self._looks: dict[str, tuple[float, float]] = {}
        self._now: dict[str, float] = {}
        self._agreed: Mapping[str, float] | None = None

    def begin(self) -> Mapping[str, float]:
        """Begin a capture, and return the seconds of each path that is left out of it."""
        self._longest = max(self._longest, self._clock() - self._last)
        return self.too_slow() if self._agreed is None else self._agreed

    def end(self) -> None:
        """End the baseline or a capture. The time until the next one starts here."""
        for place, seconds in self._now.items():
            _, before = self._looks.get(place, (0.0, 0.0))
            self._looks[place] = before, seconds
        self._now = {}
        self._agreed = None
        self._last = self._clock()

    def too_slow(self) -> dict[str, float]:
        """Return the seconds of each path that this process would leave out now."""
        limit = max(FLOOR, SHARE * max(self._longest, self._clock() - self._last))
        return {place: seconds for place in self._looks if (seconds := self.seconds(place)) > limit}

    def agree(self, left_out: Mapping[str, float]) -> None:
        """Leave out of the next capture the paths that all processes of the run leave out."""
        self._agreed = left_out

    def seconds(self, place: str) -> float:
        """Return the time that a path takes: the shorter one of its last two captures."""
        return min(self._looks.get(place, (0.0,)))

    def time(self) -> float:
        """Return the current time."""
        return self._clock()

    def add(self, place: str, seconds: float) -> None:
        """Add seconds of the current capture to the cost of a path."""
        self._now[place] = self._now.get(place, 0.0) + seconds

    def meter(self, place: str) -> Meter:
        """Return a meter of the time that a path of the last capture takes after its end."""
        return partial(self._charge, place)

    def _charge(self, place: str, seconds: float) -> None:
        before, last = self._looks.get(place, (0.0, 0.0))
        self._looks[place] = before, last + seconds

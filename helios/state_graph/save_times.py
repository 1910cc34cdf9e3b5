"""Measures how long saves inspect each attribute. No clock decides what is saved."""

from __future__ import annotations

from typing import final

from helios.protocols import Clock

SECONDS = 0.1
SHARE = 0.05
"""An attribute is slow above both: the seconds, and the share of the time since the last save."""


@final
class SaveTimes:
    """Finds attributes that make saves slow, so that each can be named once.

    It takes two saves in a row: a single slow one may be due to the machine.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last = clock()
        self._seconds: dict[str, float] = {}
        self._slow_before: set[str] = set()
        self._named: set[str] = set()

    def add(self, place: str, seconds: float) -> None:
        """Add what inspecting a part of an attribute took."""
        self._seconds[place] = self._seconds.get(place, 0.0) + seconds

    def end(self) -> dict[str, float]:
        """End a save, and return the seconds of each attribute that is now found to be slow."""
        now = self.clock()
        limit = max(SECONDS, SHARE * (now - self._last))
        slow = {place: seconds for place, seconds in self._seconds.items() if seconds > limit}
        again = self._slow_before.intersection(slow) - self._named
        self._named |= again
        self._slow_before, self._seconds = set(slow), {}
        self._last = now
        return {place: slow[place] for place in slow if place in again}

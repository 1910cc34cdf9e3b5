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
        self._before: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._named: set[str] = set()

    def add(self, place: str, seconds: float) -> None:
        """Add what inspecting a part of an attribute took."""
        self._now[place] = self._now.get(place, 0.0) + seconds

    def end(self) -> dict[str, float]:
        """End a save, and return the seconds of each attribute that is now found to be slow."""
        now = self.clock()
        limit = max(SECONDS, SHARE * (now - self._last))
        slow = {
            place: seconds
            for place, seconds in self._now.items()
            if min(seconds, self._before.get(place, 0.0)) > limit and place not in self._named
        }
        self._named |= slow.keys()
        self._before, self._now = self._now, {}
        self._last = now
        return slow

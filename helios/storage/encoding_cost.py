"""Measures how long parts of a tree take to encode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

from helios.protocols import Clock, Meter


@final
class Metering:
    """Times the encoding of some parts of a tree.

    Args:
        meters: receive the seconds of a part, by its ``id``; nested parts count for the outer one.
        count_arrays: returns the number of arrays so far, which are encoded at the end.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        meters: Mapping[int, Meter],
        count_arrays: Callable[[], int],
        clock: Clock = time.monotonic,
    ) -> None:
        self._meters = meters
        self._count_arrays = count_arrays
        self._clock = clock
        self._found: list[tuple[Meter, float, int]] = []
        self.waiting = meters

    def run(self, encode: Callable[[Any], Any], part: Any) -> Any:
        """Return the code of a part, and record how long encoding took."""
        begin, first = self._clock(), self._count_arrays()
        self.waiting = {}
        code = encode(part)
        self.waiting = self._meters
        num_arrays = self._count_arrays() - first
        self._found.append((self._meters[id(part)], self._clock() - begin, num_arrays))
        return code

    def finish(self, write_arrays: Callable[[], None]) -> None:
        """Encode all arrays, and share the time equally among them."""
        begin, num_arrays = self._clock(), max(1, self._count_arrays())
        write_arrays()
        seconds = (self._clock() - begin) / num_arrays
        for meter, own, count in self._found:
            meter(own + count * seconds)

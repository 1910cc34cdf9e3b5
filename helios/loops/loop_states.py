"""The states of a run's loops, with those of loops that are gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

from helios.loops.loop import Loop

_LOGGER = logging.getLogger(__name__)


@final
class LoopStates:
    """Takes and gives back the states of loops.

    Args:
        root: the loop above all others.
        path: its role, which begins the names of all.
    """

    def __init__(self, root: Loop, path: str) -> None:
        self._root = root
        self._path = path
        self._carried: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        """Return the states by role path."""
        return self._carried | self._root.collect_states(self._path)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give each loop its state; what is left is saved again, unread."""
        left = dict(states)
        self._root.spread_states(self._path, left)
        self._carried.update(left)
        if left:
            _LOGGER.warning(
                "The checkpoint holds the state of a loop that is not there: %s. It is carried "
                "along unread; register it again to use it.",
                ", ".join(left),
            )

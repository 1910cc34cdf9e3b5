"""Saves and restores the states of loops, and keeps those of loops that were removed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

from helios.loops.loop import Loop

_LOGGER = logging.getLogger(__name__)


@final
class LoopStates:
    """Saves and restores the states of loops.

    Args:
        root: the outermost loop.
        path: its role, which is the first part of all names.
    """

    def __init__(self, root: Loop, path: str) -> None:
        self._root = root
        self._path = path
        self._carried: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        """Return the states by role path."""
        return self._carried | self._root._collect_states(self._path)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the state of each loop; unused states are kept and saved again."""
        left = dict(states)
        self._root._spread_states(self._path, left)
        self._carried.update(left)
        if left:
            _LOGGER.warning(
                "The checkpoint holds the state of a loop that is not connected: %s. It is kept "
                "unread in later checkpoints; connect the loop again to use it.",
                ", ".join(left),
            )

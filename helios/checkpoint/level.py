"""The levels of reproducibility: what may change between two starts without changing one bit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

_MAX_NAMED = 10


class Level(Enum):
    """A level, lowest first; each keeps what those before it keep.

    docs/reproducibility.md says what each of them means.
    """

    NONE = "none"
    INCOMPLETE = "incomplete"
    ORDER = "order"
    RESTART = "restart"
    ELASTIC = "elastic"

    @property
    def height(self) -> int:
        """How many levels are lower."""
        return list(Level).index(self)

    def at_most(self, other: Level) -> Level:
        """Return the lower one of two."""
        return min(self, other, key=lambda level: level.height)


def list_missing(missing: Mapping[str, str]) -> str:
    """Return what a checkpoint lacks in words: each place with its reason.

    Example:
        >>> list_missing({"log": "a file handle", "net.seen": ""})
        'log (a file handle), net.seen'
    """
    names = [f"{place} ({reason})" if reason else place for place, reason in missing.items()]
    left = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")

"""The levels of reproducibility: what may change between two starts without changing a bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from helios.findings import Finding, FindingKind

_MAX_NAMED = 10


class Level(Enum):
    """A level; each includes the guarantees of the lower ones, which come first.

    docs/reproducibility.md explains them.
    """

    NONE = "none"
    INCOMPLETE = "incomplete"
    ORDER = "order"
    RESTART = "restart"
    ELASTIC = "elastic"

    @property
    def height(self) -> int:
        """Number of lower levels."""
        return list(Level).index(self)

    def at_most(self, other: Level) -> Level:
        """Return the lower one of two."""
        return min(self, other, key=lambda level: level.height)


_LIMITS = {
    FindingKind.OBSTACLE: Level.RESTART,
    FindingKind.MISSING: Level.INCOMPLETE,
}


def level_of(findings: Iterable[Finding], level: Level) -> Level:
    """Return what findings leave of a level."""
    for finding in findings:
        level = level.at_most(_LIMITS.get(finding.kind, level))
    return level


def list_missing(missing: Mapping[str, str], most: int = _MAX_NAMED) -> str:
    """Return what a checkpoint lacks as text: paths with their reasons, each reason once.

    Args:
        missing: the reason for each path.
        most: maximum number of paths to name; the others are counted.

    Example:
        >>> list_missing({"log": "a file handle", "net.seen": "", "text": "a file handle"})
        'log, text (a file handle); net.seen'
    """
    groups: dict[str, list[str]] = {}
    for place, reason in list(missing.items())[:most]:
        groups.setdefault(reason, []).append(place)
    texts = [
        f"{', '.join(places)} ({reason})" if reason else ", ".join(places)
        for reason, places in groups.items()
    ]
    left = len(missing) - most
    return "; ".join(texts) + (f" and {left} more" if left > 0 else "")

"""``Findings``: what limits the reproducibility of a run, and the resulting level.

Findings come from the start, from training and from saves. Checkpoints have a key for each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, final


class FindingKind(Enum):
    """A kind of finding; its value is the key of a checkpoint that holds those of the kind.

    Attributes:
        OBSTACLE: binds the run to its number of processes.
        UNSHARED: where each replica changes the model on its own.
        MISSING: where a checkpoint lacks something, and why.
        CLAIM: a component whose ``state_dict`` Helios has to trust.
    """

    OBSTACLE = "obstacles"
    UNSHARED = "unshared"
    MISSING = "missing"
    CLAIM = "claims"


@dataclass(frozen=True)
class Finding:
    """A finding.

    Attributes:
        kind: what it is.
        where: the path of its subject; empty if the text names it.
        text: what was found; empty if the path says enough.
    """

    kind: FindingKind
    where: str = ""
    text: str = ""


@final
class Findings:
    """A list of findings, each once; for one path the newest text counts.

    Args:
        findings: the first ones.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._table: dict[tuple[FindingKind, str], Finding] = {}
        self.extend(findings)

    def add(self, kind: FindingKind, where: str = "", text: str = "") -> bool:
        """Add a finding; returns whether it is new."""
        is_new = (kind, where or text) not in self._table
        self._table[kind, where or text] = Finding(kind, where, text)
        return is_new

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add findings."""
        for each in findings:
            self.add(each.kind, each.where, each.text)

    def add_missing(self, reasons: Mapping[str, str]) -> None:
        """Add what a checkpoint lacks: path and reason."""
        self.extend(Finding(FindingKind.MISSING, *item) for item in reasons.items())

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._table.values())

    def of(self, *kinds: FindingKind) -> list[Finding]:
        """Return those of some kinds."""
        return [each for each in self if each.kind in kinds]

    def names(self, kind: FindingKind) -> list[str]:
        """Return the paths of a kind, or the texts where there are none."""
        found = [each.where or each.text for each in self.of(kind)]
        # Whichever process has found a path first.
        return sorted(found) if kind is FindingKind.UNSHARED else found

    @property
    def missing(self) -> dict[str, str]:
        """The state that a checkpoint lacks: path and reason."""
        return {each.where: each.text for each in self.of(FindingKind.MISSING)}

    def by_key(self) -> dict[str, Any]:
        """Return them as a checkpoint holds them."""
        keys: dict[str, Any] = {kind.value: self.names(kind) for kind in FindingKind}
        return keys | {FindingKind.MISSING.value: self.missing}

    @classmethod
    def from_keys(cls, payload: Mapping[str, Any]) -> Findings:
        """Return those of a checkpoint, which may lack keys."""
        findings = cls()
        findings.add_missing(payload.get(FindingKind.MISSING.value, {}))
        for kind in FindingKind:
            for name in payload.get(kind.value, ()) if kind is not FindingKind.MISSING else ():
                place = (name, "") if kind is FindingKind.UNSHARED else ("", name)
                findings.add(kind, *place)
        return findings


# ---- levels: what may change between two starts without changing a bit

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
    """Return the level that is left after some findings."""
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

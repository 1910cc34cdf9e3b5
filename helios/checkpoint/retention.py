"""Which checkpoints may go: pure rules over what is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from helios.checkpoint.layout import sidecar_path


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
    """A committed checkpoint; entries are ordered by (epoch, iteration).

    Attributes:
        epoch: the epoch in its name.
        iteration: the iteration in its name.
        path: the ``.pth`` file.
    """

    epoch: int
    iteration: int
    path: Path

    @property
    def sidecar_path(self) -> Path:
        """Where the sidecar lies, if there is one."""
        return sidecar_path(self.path)


def plan(
    entries: Sequence[Entry], *, keep_last: int | None, protected: Collection[Path]
) -> list[Entry]:
    """Return what is to be deleted, oldest first (USERS.md 13).

    Args:
        entries: what is there, in any order.
        keep_last: how many of the newest stay, at least one; ``None`` for all.
        protected: files that stay whatever the rules say.
    """
    if keep_last is None:
        return []
    ranked = sorted(entries)
    old = ranked[: max(0, len(ranked) - max(1, keep_last))]
    return [entry for entry in old if entry.path not in protected]

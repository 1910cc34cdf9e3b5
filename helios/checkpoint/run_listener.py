"""``RunListener``: what records a run beside its checkpoints hears of it by these calls."""

from __future__ import annotations

from pathlib import Path

from helios.checkpoint.sidecar import Sidecar


class RunListener:
    """Listens to the saves of a run; by default it does nothing.

    All of it runs on rank 0, in the thread that writes.
    """

    def before_commit(self) -> None:
        """Write what a checkpoint relies on; an ``OSError`` makes the save fail."""

    def committed(self, path: Path, sidecar: Sidecar) -> None:
        """Note that a checkpoint is on the disk, with the sidecar that was written beside it."""

    def save_failed(self, path: Path, error: Exception) -> None:
        """Note that a checkpoint could not be written."""

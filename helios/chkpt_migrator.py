"""The migrator: converts checkpoints of helios-ml and of older formats to the current one.

``python -m helios.chkpt_migrator ROOT``, ``python -m chkpt_migrator ROOT`` and ``helios migrate
ROOT`` are the same command. Nothing from a file is executed, and a kill loses nothing: run the same
command again to continue. A second run changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from helios.errors import ArgumentError, CheckpointError
from helios.migration.folder_migration import migrate_checkpoints
from helios.storage.files import as_local_path


def migrate_checkpoints_to_current_version(root: Path) -> None:
    """Migrate every ``*.pth`` file directly in a folder to the current format.

    Files keep their names and paths. Unlike the command, this keeps no old files. Types that you
    have added with ``torch.serialization.add_safe_globals`` may be in the files.

    Args:
        root: the folder.

    Raises:
        ArgumentError: if there is no such folder.
        CheckpointError: if a file is damaged, was refused or could not be migrated, after the
            others were migrated.
    """
    folder = as_local_path("migrate_checkpoints_to_current_version(root=...)", root)
    if not folder.is_dir():
        raise ArgumentError(
            "migrate_checkpoints_to_current_version(root=...) must be a folder that exists, got "
            f"{root}. Pass the folder that holds the checkpoints."
        )
    reports = migrate_checkpoints(folder, is_recursive=False, backs_up=False)
    failures = [str(report) for report in reports if report.result.is_failure]
    if failures:
        raise CheckpointError(
            f"{len(failures)} of {len(reports)} files in {folder} could not be migrated: "
            f"{'; '.join(failures)}."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``helios migrate``; returns the exit code."""
    # What scripts call needs no command line.
    from helios.cli.commands import main as run

    return run(["migrate", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())

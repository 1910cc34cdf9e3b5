"""Kills forked copies of itself between the file operations of a migration.

Called as a script by ``test_migration_kills.py``; prints one JSON object, as ``kill_child`` does.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from helios.migration.folder_migration import migrate_checkpoints
from tests.checkpoint import kill_child
from tests.support import old_files as old

NAMES = ("1.4.1/linear_epoch_4_iter_8.pth", "2.0.1/linear_epoch_2_iter_10.pth")


def make_template(root: Path) -> None:
    """Two old files; the sidecar of an earlier migration lies beside the first."""
    migrate_checkpoints(old.lay_out(root, NAMES[0]))
    for name in NAMES:
        old.lay_out(root, name)


def main() -> None:
    root = Path(sys.argv[1])
    template = root / "template"
    make_template(template)

    def prepare(place: Path) -> None:
        shutil.copytree(template, place, dirs_exist_ok=True)

    kill_child.SCENES["migrate"] = (prepare, migrate_checkpoints)
    sys.stdout.write(json.dumps(kill_child.play("migrate", root)))

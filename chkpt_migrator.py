"""The migrator under its short name: ``python -m chkpt_migrator ROOT``."""

import sys

from helios.chkpt_migrator import main, migrate_checkpoints_to_current_version

__all__ = ["main", "migrate_checkpoints_to_current_version"]

if __name__ == "__main__":
    sys.exit(main())

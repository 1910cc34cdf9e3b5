"""``helios migrate``: the migrator as a command of ``helios``."""

from __future__ import annotations

from helios.chkpt_migrator import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "add_arguments", "run"]

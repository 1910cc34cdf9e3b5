"""``helios migrate``: the migrator as a command of ``helios``."""

from __future__ import annotations

from helios.chkpt_migrator import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "NAME", "SUMMARY", "add_arguments", "run"]

NAME = "migrate"
SUMMARY = "migrate checkpoints of helios-ml and of older formats to the current one"

"""``helios migrate``: the migrator, under the roof of the other commands."""

from __future__ import annotations

from helios.chkpt_migrator import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "NAME", "SUMMARY", "add_arguments", "run"]

NAME = "migrate"
SUMMARY = "bring checkpoints of helios-ml and of older formats to the present one"

"""The commands of ``helios``: from command-line arguments to lines or JSON."""

from helios.cli.commands import main

__all__ = ["main"]

"""The commands of ``helios``: strings to objects, and objects to lines or JSON.

Nothing here decides anything about checkpoints, and nothing imports this.
"""

from helios.cli.commands import main

__all__ = ["main"]

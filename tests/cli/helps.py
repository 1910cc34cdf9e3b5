"""The help of every command, as golden files hold it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from unittest import mock

from helios.cli import commands

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "help"


def help_texts() -> dict[str, str]:
    """Return the help of the program and of each command, by the name of the golden file."""
    # argparse asks the terminal for its width, and later versions of Python for its colours.
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        parser = commands.build_parser()
        texts = {"helios.txt": parser.format_help()}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, command in action.choices.items():
                    texts[f"{name}.txt"] = command.format_help()
    return texts

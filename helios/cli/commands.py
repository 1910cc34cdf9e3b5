"""The command line: one parser, a table of commands, and one place that handles errors.

Exit codes are 0 for success, 1 for a checkpoint that is not good or could not be used, 2 for wrong
usage; 130 after Ctrl-C and 141 after a broken pipe, as in shells.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from helios.errors import ArgumentError, HeliosError, LedgerError, UsageError
from helios.version import __version__

FAILED, WRONG_USAGE, INTERRUPTED, NO_READER = 1, 2, 130, 141

# The module in which a command is found when it is used, and what it does.
_COMMANDS = {
    "ls": ("checkpoints", "list the checkpoints of a folder and of the folders below it"),
    "inspect": ("checkpoints", "show the sidecar, the counters and the tensors of a checkpoint"),
    "verify": ("checkpoints", "verify every byte of checkpoints and ledgers"),
    "diff": ("runs", "find the first difference between two runs or two checkpoints"),
    "replay": ("runs", "repeat a part of a run, and compare it with its ledger"),
    "report": ("runs", "write a report of a run"),
    "compare": ("runs", "mean, deviation and interval of the results of several runs"),
    "export": ("conversions", "write the weights of a checkpoint to a separate file"),
    "doctor": ("doctor", "show versions, devices and settings, for bug reports"),
    "migrate": (
        "conversions",
        "migrate checkpoints of helios-ml and of older formats to the current one",
    ),
}
_WIDTH = 80
_EPILOG = """\
Nothing in a file is ever executed, except the script of replay. Only report,
compare, export and migrate write files. All commands take --json: one
document on standard output. Exit codes: 0 good, 1 not good, 2 wrong usage.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in at most 80 columns, wherever it is printed."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, width=width, max_help_position=24)


class _CommandParser(argparse.ArgumentParser):
    """The parser of a command; its module is imported only when the command is used."""

    _is_complete = False

    def _complete(self) -> None:
        if not self._is_complete:
            self._is_complete = True
            name = self.prog.split()[-1]
            module = importlib.import_module(f"helios.cli.{_COMMANDS[name][0]}")
            module.COMMANDS[name].add_to(self)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self._complete()
        return super().parse_known_args(*args, **kwargs)

    def format_help(self) -> str:
        self._complete()
        return super().format_help()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command stores what it does in the result."""
    parser = argparse.ArgumentParser(
        prog="helios",
        description="Work with checkpoints and runs; only replay needs the code that made them.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"helios {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, (_, summary) in _COMMANDS.items():
        commands.add_parser(name, help=summary, formatter_class=_Formatter)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments after ``helios``; those of the process by default.

    Returns:
        The exit code.

    Raises:
        SystemExit: with 2 for wrong usage, with 0 after ``--help``.
    """
    words, rest = _split(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words, rest)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write(
            f"helios {words[0]}: this command needs PyTorch, and there is no module torch "
            f"for {sys.executable}. Install it for this Python, as pytorch.org says.\n"
        )
        return WRONG_USAGE


def _run(words: list[str], rest: list[str]) -> int:
    namespace = build_parser().parse_args(words)
    namespace.rest = rest
    try:
        code: int = namespace.run(namespace).show(as_json=namespace.json)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail(namespace, "interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # The interpreter flushes again when it exits, and would report an error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (ArgumentError, UsageError, LedgerError) as error:
        return _fail(namespace, str(error), WRONG_USAGE)
    except (HeliosError, OSError) as error:
        return _fail(namespace, str(error), FAILED)
    except (MemoryError, RecursionError) as error:
        return _fail(namespace, str(error) or "there is too little memory.", FAILED)
    return code


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own words, and those after ``--`` for the script of replay."""
    words = list(argv)
    if words[:1] != ["replay"] or "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _fail(namespace: argparse.Namespace, message: str, code: int) -> int:
    sys.stderr.write(f"helios {namespace.command}: {message}\n")
    return code

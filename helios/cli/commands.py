"""The command line: one parser, a module for each command, and one place that handles errors.

Exit codes are 0 for success, 1 for a checkpoint that is not good or could not be used, 2 for wrong
usage; 130 after Ctrl-C and 141 after a broken pipe, as in shells.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from helios.cli import (
    compare,
    diff,
    export,
    inspect,
    ls,
    migrate,
    pack,
    replay,
    report,
    send,
    verify,
)
from helios.errors import ArgumentError, HeliosError, UsageError
from helios.version import __version__

FAILED, WRONG_USAGE, INTERRUPTED, NO_READER = 1, 2, 130, 141

_COMMANDS = (ls, inspect, verify, diff, replay, report, compare, pack, send, export, migrate)
_WIDTH = 80
_EPILOG = """\
Nothing in a file is ever executed, except the script of replay. Only report,
compare, pack, send, export and migrate write files. All commands take --json:
one document on standard output. Exit codes: 0 good, 1 not good, 2 wrong usage.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in at most 80 columns, wherever it is printed."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, width=width, max_help_position=24)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command stores its ``run`` in the result."""
    parser = argparse.ArgumentParser(
        prog="helios",
        description="Work with checkpoints and runs; only replay needs the code that made them.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"helios {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=_Formatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
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
    words, rest = replay.split(sys.argv[1:] if argv is None else argv)
    namespace = build_parser().parse_args(words)
    namespace.rest = rest
    try:
        code: int = namespace.run(namespace)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail(namespace, "interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # The interpreter flushes again when it exits, and would report an error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (ArgumentError, UsageError) as error:
        return _fail(namespace, str(error), WRONG_USAGE)
    except (HeliosError, OSError) as error:
        return _fail(namespace, str(error), FAILED)
    except (MemoryError, RecursionError) as error:
        return _fail(namespace, str(error) or "there is too little memory.", FAILED)
    return code


def _fail(namespace: argparse.Namespace, message: str, code: int) -> int:
    sys.stderr.write(f"helios {namespace.command}: {message}\n")
    return code

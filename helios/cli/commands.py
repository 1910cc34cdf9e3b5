"""The command line: one parser, and one place that handles errors.

Exit codes are 0 for success, 1 for a checkpoint that is not good or could not be used, 2 for wrong
usage; 130 after Ctrl-C and 141 after a broken pipe, as in shells.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence

from helios.cli import checkpoints, conversions, output, runs, train
from helios.cli.output import Answer
from helios.errors import ArgumentError, HeliosError, LedgerError, UsageError
from helios.version import __version__

FAILED, WRONG_USAGE, INTERRUPTED, NO_READER = 1, 2, 130, 141
# What is missing, and how it is installed.
_REMEDIES = {
    "torch": "Install it for this Python, as pytorch.org says.",
    "safetensors": 'Install it with: pip install "helios-trainer[safetensors]", or export to pt.',
    **dict.fromkeys(("jinja2", "matplotlib"), "pip install 'helios-trainer[report]'"),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command stores what it does in the result."""
    parser = argparse.ArgumentParser(
        prog="helios",
        description="Work with checkpoints and runs; only train and replay need your code.",
        epilog="Exit codes: 0 good, 1 not good, 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=f"helios {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], Answer], usage: str | None = None
    ) -> argparse.ArgumentParser:
        text = inspect.getdoc(run) or ""
        command = commands.add_parser(
            name,
            usage=usage,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print one JSON document")
        return command

    for module in (train, checkpoints, runs, conversions):
        module.add_commands(add)
    add("doctor", describe_this_machine)
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
    namespace = build_parser().parse_args(words)
    namespace.rest = rest
    try:
        answer: Answer = namespace.run(namespace)
        answer.show(as_json=namespace.json)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again when it exits, and would report an error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (Exception, KeyboardInterrupt) as error:
        if namespace.command == train.NAME:
            # It is of the user's code, whose traceback counts.
            raise
        message, code = _describe(error)
        sys.stderr.write(f"helios {namespace.command}: {message}\n")
        return code
    return 0 if answer.is_good else FAILED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own words, and those for the script of replay or for train.

    The former stand after ``--``, the latter after the two classes.
    """
    words = list(argv)
    if words[:1] == [train.NAME]:
        names = [n for n, word in enumerate(words[1:], 2) if not word.startswith("-")]
        end = names[1] if len(names) > 1 else len(words)
        return words[:end], words[end:]
    if words[:1] != ["replay"] or "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _describe(error: BaseException) -> tuple[str, int]:
    """Return what to say of an error, and the exit code; an unexpected one is raised again."""
    match error:
        case KeyboardInterrupt():
            return "interrupted.", INTERRUPTED
        case ModuleNotFoundError(name=str(name)) if (package := name.split(".")[0]) in _REMEDIES:
            text = f"{package} is not installed for {sys.executable}. {_REMEDIES[package]}"
            return text, WRONG_USAGE
        case ArgumentError() | UsageError() | LedgerError():
            return str(error), WRONG_USAGE
        case HeliosError() | OSError() | MemoryError() | RecursionError():
            return str(error) or "there is too little memory.", FAILED
    raise error


def describe_this_machine(_: argparse.Namespace) -> Answer:
    """Show versions, devices and settings, for bug reports.

    The settings are those that affect results, as a new process has them; a script
    may change them. Exit code 0. 2: PyTorch cannot be imported.
    """
    # Only a command that is used may import PyTorch.
    from helios.core.environment import describe_process

    facts = describe_process()
    return Answer(output.facts(facts), facts)

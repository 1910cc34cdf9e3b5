"""``helios doctor``: what a report of a bug needs of this machine."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

from helios.cli import output
from helios.cli.output import Answer
from helios.version import __version__


def describe_this_machine(_: argparse.Namespace) -> Answer:
    """Show versions, devices and settings, for bug reports.

    The settings are those that affect results, as a new process has them; a script
    may change them. Exit code 0. 2: PyTorch cannot be imported.
    """
    # Only a command that is used may import PyTorch.
    import torch

    from helios.ledger.environment import describe_machine

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = {"helios": __version__, "system": platform.platform(), **describe_machine(device)}
    return Answer(output.facts(facts), facts)


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    add("doctor", describe_this_machine)

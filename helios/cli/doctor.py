"""``helios doctor``: what a report of a bug needs of this machine."""

from __future__ import annotations

import argparse
import platform

from helios.cli import output
from helios.cli.output import Answer, Command
from helios.version import __version__


def describe_this_machine(_: argparse.Namespace) -> Answer:
    """Show the versions, the device and the settings that affect results, as a new
    process has them; a script may change them. Paste the output into bug reports.

    Exit code 0. 2: PyTorch cannot be imported.
    """
    # Only a command that is used may import PyTorch.
    import torch

    from helios.ledger.environment import describe_machine

    failure, device = "", torch.device("cpu")
    if torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", 0)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
    facts = {"helios": __version__, "system": platform.platform(), **describe_machine(device)}
    if failure:
        facts["gpu failure"] = failure
    return Answer(output.facts(facts), lambda: facts)


COMMANDS = {"doctor": Command(describe_this_machine)}

"""``helios send``: send what a tracker has stored."""

from __future__ import annotations

import argparse

from helios.cli import output
from helios.errors import HeliosError, UsageError
from helios.tracking import sender_process

DESCRIPTION = """\
Send what the plugin Tracker has stored in its folder and not sent yet: to its
server of MLflow or Weights & Biases, or into an offline run of the latter,
which contains all points of the run, and replaces an earlier one. Upload that
with `wandb sync`.

Call it after a training that was killed, that could not reach its server, or
that ran with Tracker(sends=False). Points that were sent before are not stored
twice.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("folder", metavar="DIR", help="the folder of the tracker")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Send; 0 when everything is acknowledged.

    Raises:
        UsageError: if the folder has no tracker, or the library is not installed.
        HeliosError: if the server cannot be reached, or refuses something.
    """
    folder = output.existing_folder(namespace.folder)
    try:
        number, place = sender_process.send(folder)
    except HeliosError:
        raise
    except ImportError as error:
        raise UsageError(
            f"The library of the tracker cannot be imported: {error}. Install "
            '"helios-trainer[mlflow]" or "helios-trainer[wandb]".'
        ) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(". ")
        raise HeliosError(
            f"Not everything was sent: {cause}. What is missing is kept in {folder}. Run "
            "the same command again."
        ) from error
    if namespace.json:
        output.print_json({"path": str(folder), "num_rows": number, "place": place})
    else:
        output.print_lines(f"Sent {number} rows to {place}.")
    return 0

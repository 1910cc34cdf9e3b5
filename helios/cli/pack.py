"""``helios pack``: the evidence of a run in one archive."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from helios.checkpoint import file_names
from helios.checkpoint.export import select_weights
from helios.checkpoint.export_files import write_weights
from helios.checkpoint.status import Depth, look_into
from helios.cli import output
from helios.cli.report import find_target
from helios.core.text import size_text
from helios.errors import CheckpointError
from helios.ledger.run_facts import find_run
from helios.reports.packing import pack

DESCRIPTION = """\
Pack ledger, manifest, lineage, times, source files, local changes and the
weights of the newest checkpoint into one zip file, with digests of all files
and a README of the commands that check them. The same run gives the same
bytes.

--anonymous removes names of hosts and users, home folders and other absolute
paths, and the git remote, branch, commit and author. It does not know names
that you have written into comments or results.

The default file is <run>.zip in the folder of the run; it is overwritten.

Exit code 0: the file is written. 2: wrong usage, or the run has no evidence.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, or its ledger")
    parser.add_argument("--anonymous", action="store_true", help="remove names and paths")
    parser.add_argument("--out", metavar="FILE", help="the zip file to write")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Pack; 0 when the archive is on the disk.

    Raises:
        LedgerError: if there is no run, if its files cannot be read, or if it cannot be anonymous.
        ArgumentError: for an unsuitable name of the file.
    """
    folder = find_run(namespace.folder)
    target = find_target(namespace.out, folder, folder.resolve().name, suffixes=(".zip",))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        weights = Path(scratch, "weights.pt")
        notes = _write_weights(folder, weights)
        found = pack(
            folder,
            target,
            weights=weights if weights.exists() else None,
            notes=notes,
            is_anonymous=namespace.anonymous,
        )
    if namespace.json:
        document = {"path": str(target), "name": found.name, "digests": found.digests}
        output.print_json(document | {"notes": found.notes})
    else:
        size = size_text(target.stat().st_size)
        output.print_lines(f"Wrote {len(found.digests) + 1} files, {size}, to {target}.")
        output.print_lines(*(f"note: {note}" for note in found.notes))
    return 0


def _write_weights(folder: Path, target: Path) -> list[str]:
    """Write the weights of the newest good checkpoint; returns what there is to say of them."""
    notes = []
    for path in reversed(file_names.find_checkpoints(folder)):
        status, tree = look_into(path, Depth.BYTES)
        if not status.is_good:
            notes.append(f"The checkpoint {path.name} is not good, and was passed over.")
            continue
        try:
            weights = select_weights(tree)
        except CheckpointError as error:
            return [*notes, str(error)]
        write_weights(target, weights, kind="pt", metadata={})
        digest = status.sidecar.digest if status.sidecar is not None else ""
        return [*notes, f"The weights are those of {path.name} ({digest or 'without a digest'})."]
    return [*notes, "There is no checkpoint, so there are no weights."]

"""``helios pack``: the evidence of a run in one archive."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from helios.checkpoint import file_names
from helios.checkpoint.export import select_weights, write_weights
from helios.checkpoint.status import Depth, look_into
from helios.cli import output
from helios.cli.report import find_target
from helios.core.sizes import size_text
from helios.errors import CheckpointError, LedgerError, UsageError
from helios.ledger.anonymizing import make_anonymizer
from helios.ledger.lineage import read_lineage
from helios.ledger.packing import Pack, check_names, gather, write_archive
from helios.ledger.summary.run_facts import RunFacts, read_run

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

_WEIGHTS = "weights.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, or its ledger")
    parser.add_argument("--anonymous", action="store_true", help="remove names and paths")
    parser.add_argument("--out", metavar="FILE", help="the zip file to write")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Pack; 0 when the archive is on the disk.

    Raises:
        UsageError: if there is no run, if its files cannot be read, or if it cannot be anonymous.
        ArgumentError: for an unsuitable name of the file.
    """
    try:
        facts = read_run(namespace.folder)
        target = find_target(namespace.out, facts.folder, facts.name, suffixes=(".zip",))
        pack = _pack(facts, target, is_anonymous=namespace.anonymous)
    except LedgerError as error:
        raise UsageError(str(error)) from error
    if namespace.json:
        document = {"path": str(target), "name": pack.name, "digests": pack.digests}
        output.print_json(document | {"notes": pack.notes})
    else:
        size = size_text(target.stat().st_size)
        output.print_lines(f"Wrote {len(pack.digests) + 1} files, {size}, to {target}.")
        output.print_lines(*(f"note: {note}" for note in pack.notes))
    return 0


def _pack(facts: RunFacts, target: Path, *, is_anonymous: bool) -> Pack:
    anonymizer = None
    if is_anonymous:
        events = [*read_lineage(facts.folder), *facts.times.starts]
        anonymizer = make_anonymizer(facts.manifest, events)
    pack = gather(facts, anonymizer)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        notes = _add_weights(pack, facts.folder, Path(scratch))
        pack.notes += notes if anonymizer is None else map(anonymizer.replace, notes)
        if anonymizer is not None:
            check_names(pack, anonymizer)
        write_archive(target, pack, facts, anonymizer)
    return pack


def _add_weights(pack: Pack, folder: Path, scratch: Path) -> list[str]:
    """Add the weights of the newest good checkpoint; returns what there is to say of it."""
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
        write_weights(scratch / _WEIGHTS, weights, kind="pt", metadata={})
        pack.paths[_WEIGHTS] = scratch / _WEIGHTS
        digest = status.sidecar.digest if status.sidecar is not None else ""
        return [*notes, f"The weights are those of {path.name} ({digest or 'without a digest'})."]
    return [*notes, "There is no checkpoint, so there are no weights."]

"""``helios diff``: how two runs or two checkpoints differ."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from helios.checkpoint import file_names
from helios.cli import output
from helios.core.local_paths import as_local_path
from helios.core.text import with_step
from helios.errors import DamagedCheckpointError, UsageError
from helios.ledger.differences import Difference, diff
from helios.ledger.manifest.manifest_changes import Effect, ManifestChange

if TYPE_CHECKING:
    from helios.checkpoint.comparison import CheckpointDifference

DESCRIPTION = """\
Compare the ledgers of two runs line by line, and the scores where both have
validated. Show the first iteration that differs, what differs in it and
possible causes; what was not compared is named. Or compare the tensors of two
checkpoints bit for bit.

Exit code 0: both are equal. 1: they differ. 2: wrong usage, or one of them
cannot be read.
"""

_MOST_TENSORS = 20
_MOST_CHANGES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    for name in ("first", "second"):
        text = "the folder of a run, its ledger, or a checkpoint"
        parser.add_argument(name, metavar="RUN|FILE", help=text)
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Compare; 0 if both are equal, 1 if they differ.

    Raises:
        UsageError: if a checkpoint cannot be read.
        LedgerError: if the ledger of a run cannot be read.
    """
    paths = [as_local_path("RUN|FILE", each) for each in (namespace.first, namespace.second)]
    suffixes = (file_names.SUFFIX, file_names.FOLDER_SUFFIX)
    are_checkpoints = [path.suffix in suffixes for path in paths]
    if are_checkpoints[0] != are_checkpoints[1]:
        raise UsageError(
            f"A run cannot be compared with a checkpoint, got {paths[0]} and {paths[1]}. Pass two "
            "checkpoints, or the folders of two runs."
        )
    try:
        found = _compare(paths) if all(are_checkpoints) else diff(*paths)
    except DamagedCheckpointError as error:
        raise UsageError(str(error)) from error
    if namespace.json:
        output.print_json(found.as_dict())
    else:
        output.print_lines(*(_lines(found) if isinstance(found, Difference) else _tensors(found)))
    return 0 if found.is_equal else 1


def _compare(paths: list[Path]) -> CheckpointDifference:
    # Ledgers are compared without PyTorch.
    from helios.checkpoint.comparison import compare_checkpoints

    return compare_checkpoints(*(output.existing_checkpoint(str(path)) for path in paths))


def _tensors(found: CheckpointDifference) -> list[str]:
    if found.is_equal:
        return [f"equal: {found.num_tensors} tensors"]
    lines = [f"tensors that differ: {len(found.tensors)}, first {found.tensors[0].path}"]
    for each in found.tensors[:_MOST_TENSORS]:
        text = each.what
        if each.what == "values":
            text = f"{each.num_elements} of {each.size} elements"
            text += "" if each.max_ulp is None else f", by at most {each.max_ulp} ulp"
        lines.append(f"  {each.path}: {text}")
    rest = len(found.tensors) - _MOST_TENSORS
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def _lines(found: Difference) -> list[str]:
    lines = []
    if not found.has_same_definition:
        lines.append("The runs have different definitions: options, seed or data differ.")
    if found.levels[0] != found.levels[1]:
        lines.append("Only one of the ledgers is full: what both hold is compared.")
    end = with_step(found.num_equal, found.steps.get("num_equal"))
    if found.is_equal:
        lines.append(f"equal: iterations {found.begins_after + 1} to {end}")
        return [*lines, *output.comparison_lines(found)]
    if found.iteration is None and found.lengths[0] == found.lengths[1]:
        text = "but only one of the runs has ended"
        lines.append(f"equal up to iteration {end}, {text}")
        return [*lines, *output.comparison_lines(found)]
    if found.iteration is None:
        first, second = found.lengths
        return [
            *lines,
            f"equal up to iteration {end}; one has {first} iterations, the other one {second}",
            *output.comparison_lines(found),
        ]
    lines += output.difference_lines(found)
    return [*lines, *_manifest_lines(found.manifest)]


def _manifest_lines(changes: list[ManifestChange]) -> list[str]:
    shown = [each for each in changes if each.effect is not Effect.NONE]
    if not shown:
        return []
    lines = ["the newest starts of both runs differ in:"]
    lines += [f"  - {each} ({each.effect.value}: {each.reason})" for each in shown[:_MOST_CHANGES]]
    rest = len(shown) - _MOST_CHANGES
    lines += [f"  and {rest} more, see --json"] if rest > 0 else []
    harmless = len(changes) - len(shown)
    return [*lines, f"  and {harmless} harmless differences"] if harmless else lines

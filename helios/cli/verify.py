"""``helios verify``: whether the bytes of checkpoints are those that were written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from helios.best import BestValidation
from helios.checkpoint import file_names
from helios.checkpoint.folder_status import survey
from helios.checkpoint.status import Checked, Condition, Depth, Status, examine, look_into
from helios.cli import output
from helios.core.local_paths import as_local_path
from helios.errors import ArgumentError, LedgerError
from helios.ledger.book import FILE_NAME
from helios.ledger.verification import LedgerStatus, verify

DESCRIPTION = """\
Read checkpoints completely and compare them with the digests in their sidecars,
or with the checksums of their containers if there is no digest. Folders are
searched recursively, except for files that were put aside: damaged files, and
folders named before-*. The ledger of a folder is read, too: every line must
follow from the one before it, and every checkpoint must belong to it
and have the scores and buffers that the run has recorded.

Exit code 0: all are good. 1: at least one is not. 2: wrong usage, or a folder
without checkpoints and ledgers.
"""

_HOW = {
    Checked.DIGEST: "digest",
    Checked.SUMS: "no digest to compare; the container's checksums match",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("path", metavar="FILE|DIR", help="a checkpoint, or a folder of them")
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Verify; 0 if all are good, 1 if one is not.

    Raises:
        ArgumentError: if there is nothing to verify.
    """
    given = as_local_path("FILE|DIR", namespace.path)
    root = given if given.is_dir() else output.existing_file(namespace.path)
    found: list[Status] = []
    ledgers: list[LedgerStatus] = []
    for part in _examine(root):
        if isinstance(part, LedgerStatus):
            ledgers.append(part)
        else:
            found.append(part)
        if not namespace.json:
            lines = _ledger_lines(part) if isinstance(part, LedgerStatus) else [_line(part)]
            output.print_lines(*lines)
    if not found and not ledgers:
        raise ArgumentError(
            f"There is no checkpoint or ledger to verify in {root}. Pass a checkpoint, or the "
            "folder of a run."
        )
    is_good = all(status.is_good for status in found) and all(each.is_good for each in ledgers)
    if namespace.json:
        documents = [output.status_document(status) for status in found]
        document = {"root": str(root), "is_good": is_good, "files": documents}
        output.print_json(document | {"ledgers": [each.as_dict() for each in ledgers]})
    return 0 if is_good else 1


def _examine(root: Path) -> Iterator[Status | LedgerStatus]:
    if root.suffix == Path(FILE_NAME).suffix:
        yield _verify_ledger(root)
        return
    if file_names.is_folder(root) or not root.is_dir():
        yield examine(root, Depth.BYTES)
        return
    seen: set[Path] = set()
    for folder in survey(root, Depth.BYTES, with_moved_aside=False):
        files = [part for part in folder.files if part.condition is not Condition.ASIDE]
        yield from files
        marks = {
            part.path.name: part.sidecar.ledger
            for part in files
            if part.sidecar is not None and part.sidecar.ledger is not None
        }
        digests = {
            part.path.name: part.sidecar.digest
            for part in files
            if part.sidecar is not None and part.sidecar.digest
        }
        scores = {part.path.name: _find_scores(part) for part in files}
        newest = files[-1].sidecar if files else None
        ended_at = newest.ledger if newest is not None and newest.finished else None
        if marks or (folder.path / FILE_NAME).exists():
            hash_buffers = partial(_hash_buffers, folder.path)
            yield _verify_ledger(
                folder.path / FILE_NAME, marks, digests, ended_at, scores, hash_buffers
            )
            seen.add(folder.path / FILE_NAME)
    for path in _find_ledgers(root):
        if path not in seen:
            yield _verify_ledger(path)


def _find_scores(part: Status) -> dict[int, Mapping[str, float]]:
    """Return the scores in the sidecar of a checkpoint, by the iteration of their validation."""
    sidecar = part.sidecar
    if sidecar is None:
        return {}
    best = BestValidation.from_plain(sidecar.best)
    found = {} if best is None else {best.iteration: best.scores}
    return {**found, sidecar.iteration: sidecar.metrics}


def _hash_buffers(folder: Path, name: str, buffers: Collection[str]) -> dict[str, str | None]:
    """Return the hashes of buffers in a checkpoint; of one that is damaged there are none."""
    if not buffers:
        return {}
    # What reads text only starts without PyTorch.
    from helios.checkpoint.export import find_network_tensors
    from helios.ledger.weight_digests import hash_buffer

    status, tree = look_into(folder / name)
    found = find_network_tensors(tree, buffers) if status.is_good else {}
    return {key: hash_buffer(part) for key, part in found.items()}


def _find_ledgers(root: Path) -> Iterator[Path]:
    """Yield the ledgers in a folder and below it, except for those that were put aside."""
    for path in sorted(root.rglob(FILE_NAME)):
        if not any(part.startswith("before-") for part in path.relative_to(root).parts):
            yield path


def _verify_ledger(
    path: Path,
    marks: dict[str, dict[str, Any]] | None = None,
    digests: dict[str, str] | None = None,
    ended_at: dict[str, Any] | None = None,
    scores: dict[str, dict[int, Mapping[str, float]]] | None = None,
    hash_buffers: Callable[[str, Collection[str]], Mapping[str, str | None]] | None = None,
) -> LedgerStatus:
    if not path.is_file():
        return LedgerStatus(path, findings=["is missing"])
    try:
        return verify(
            path,
            marks,
            digests=digests,
            ended_at=ended_at,
            scores=scores,
            hash_buffers=hash_buffers,
        )
    except LedgerError as error:
        return LedgerStatus(path, findings=[str(error)])


def _ledger_lines(verdict: LedgerStatus) -> list[str]:
    if not verdict.is_good:
        return [f"bad         {verdict.path}: {finding}" for finding in verdict.findings]
    begin = f" after the first {verdict.begins_after}" if verdict.begins_after else ""
    end = "the run has ended" if verdict.has_ended else "the run has not ended"
    count = verdict.num_scored
    scored = f"; scores of {count} validation{'s' if count > 1 else ''} match" if count else ""
    buffers = f"; buffers match ({verdict.num_buffers})" if verdict.num_buffers else ""
    return [
        f"good        {verdict.path} ({verdict.num_iterations} iterations{begin}, hash "
        f"{verdict.hash}; {end}{scored}{buffers})"
    ]


def _line(status: Status) -> str:
    if not status.is_good:
        return f"{status.condition.value:10}  {status.reason}"
    needs = f"; refers to {', '.join(status.needs)}" if status.needs else ""
    return f"{status.condition.value:10}  {status.path} ({_HOW[status.checked]}{needs})"

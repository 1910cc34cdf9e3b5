"""``helios ls``, ``inspect`` and ``verify``: checkpoints, without the code that wrote them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.loading import Checked, Condition, Depth
from helios.checkpoint.retention import rank_files
from helios.checkpoint.status import (
    FolderStatus,
    StartOutcome,
    Status,
    examine,
    examine_folder,
    look_into,
    survey,
)
from helios.cli import output
from helios.cli.output import Answer
from helios.errors import ArgumentError, CheckpointError, LedgerError
from helios.findings import list_missing
from helios.ledger.book import FILE_NAME
from helios.ledger.run_file import read_run
from helios.ledger.verification import LedgerStatus, verify
from helios.storage.files import as_local_path
from helios.text import count_text, number_text, size_text, with_step

_LIST_COLUMNS = {"": "<", "file": "<", "iteration": ">", "size": ">", "state": "<"}
_LIST_COLUMNS |= {"metrics": "<", "level": "<"}
_MARKS = {StartOutcome.RESUMES: "*", StartOutcome.REFUSES: "!", StartOutcome.FRESH: ""}
_TENSOR_COLUMNS = {"tensor": "<", "type": "<", "shape": "<", "size": ">", "": "<"}
_SECTIONS = (file_names.KEY_TRAINING_STATE, file_names.KEY_CURSOR, file_names.KEY_OPTIONS)


def existing(place: str) -> Path:
    """Return the path of an existing file or folder.

    Raises:
        ArgumentError: if there is none.
    """
    path = as_local_path("FILE|DIR", place)
    if not path.exists():
        raise ArgumentError(f"No such file or folder: {path}.")
    return path


def find_checkpoint(place: str, *, takes_best: bool) -> Path:
    """Return a named checkpoint, or the one to use of a run's folder.

    Args:
        place: a checkpoint, or the folder of a run.
        takes_best: whether to take the best one of the folder, not the one that a start of ``fit``
            would resume from.

    Raises:
        ArgumentError: if there is none.
        CheckpointError: if nothing says which one is the best, or none has a score.
    """
    path = existing(place)
    if file_names.is_folder(path) or not path.is_dir():
        return path
    folder = examine_folder(path)
    if not folder.files:
        raise ArgumentError(f"There is no checkpoint directly in {path}. Pass the folder of a run.")
    if not takes_best:
        return folder.start or folder.files[-1].path
    ranking = rank_files(folder.files)
    if ranking.path is None:
        why = "no rule" if ranking.rule is None else "no score"
        raise CheckpointError(
            f"Nothing says which checkpoint in {path} is the best: they have {why} to rank them. "
            "Pass a file, or train with CheckpointStore(keep_best=KeepBest(...))."
        )
    if ranking.lacks_best:
        output.warn(f"the best validation has no checkpoint: {ranking.best}.")
    return ranking.path


def list_folder(namespace: argparse.Namespace) -> Answer:
    """List the checkpoints of a run's folder, or of all runs below chkpt_root.

    States: good, not verified (no fault so far, but not every byte was read),
    damaged, unmigrated (of helios-ml), newer (a later format), foreign (not a
    checkpoint of Helios), unreadable (disk or permissions), put aside (found
    damaged at an earlier start). A star marks the file from which fit would
    resume, an exclamation mark the one at which it would stop with an error.
    helios verify reads every byte.
    """
    root = existing(namespace.path)
    folders = [(folder, _describe_folder(folder)) for folder in survey(root)]
    lines = (line for each in folders for line in ("", *_show_folder(*each)))
    nothing = f"There is no folder of checkpoints in {str(root)!r}."
    return Answer(
        islice(lines, 1, None) if folders else [nothing],
        {"root": root, "folders": [document for _, document in folders]},
    )


def _describe_folder(folder: FolderStatus) -> dict[str, Any]:
    ranking = rank_files(folder.files)
    return {
        "path": folder.path,
        "start": folder.outcome.value,
        "start_path": folder.start,
        "starts": _starts(folder.path),
        "params": _params(folder),
        "best": None if ranking.best is None else vars(ranking.best),
        "best_path": ranking.path,
        "files": [_describe_status(status) for status in folder.files],
    }


def _describe_status(status: Status) -> dict[str, Any]:
    document = dataclasses.asdict(status) | {"checked": status.checked.value}
    del document["condition"]
    return {**document, "state": status.state}


def _show_folder(folder: FolderStatus, document: dict[str, Any]) -> Iterator[str]:
    yield str(folder.path)
    params = output.value_text(document["params"])
    yield from output.facts({"starts": document["starts"], "params": params})
    yield from output.table(_LIST_COLUMNS, [_file_row(status, folder) for status in folder.files])
    ranking = rank_files(folder.files)
    if ranking.best is not None:
        name = "none" if ranking.path is None else ranking.path.name
        lack = ", without a checkpoint; best checkpoint" if ranking.lacks_best else ""
        yield f"best: {ranking.best}{lack}: {name}"
    # The newest one stands for all in the same state, or with the same lack.
    yield from {x.state: x.reason for x in folder.files if not x.is_good}.values()
    sidecars = {x.path.name: x.sidecar for x in folder.files if x.sidecar is not None}
    lacks = {list_missing(x.missing): name for name, x in sidecars.items() if x.missing}
    yield from (f"{name} lacks {text}." for text, name in lacks.items())
    if folder.outcome is StartOutcome.REFUSES and folder.start is None:
        yield "A start of fit stops with an error: all checkpoints here are damaged."


def _file_row(status: Status, folder: FolderStatus) -> tuple[str, ...]:
    row = (
        _MARKS[folder.outcome] if status.path == folder.start else "",
        status.path.name,
        "" if status.place is None else with_step(status.place[1], status.step),
        size_text(status.size) if status.size else "",
        status.state,
    )
    if status.sidecar is None:
        return (*row, "", "")
    scores = (f"{name}={number_text(x, 4)}" for name, x in status.sidecar.metrics.items())
    return (*row, " ".join(scores), ", ".join([status.sidecar.level, *status.sidecar.claims]))


def _starts(folder: Path) -> str:
    """Return how often the run was started, and what became of its last start."""
    try:
        starts = read_run(folder).starts
    except LedgerError as error:
        return str(error)
    if not starts:
        return ""
    last = starts[-1]
    processes = count_text(last.processes, "process")
    return f"{len(starts)}, the last one {last.time} on {last.host}, {processes}: {last.end}"


def _params(folder: FolderStatus) -> dict[str, Any]:
    """Return what the newest checkpoint says that the run is declared with."""
    sidecars = [each.sidecar for each in folder.files if each.sidecar is not None]
    newest = max(sidecars, key=lambda each: (each.epoch, each.iteration), default=None)
    return {} if newest is None else newest.options.get("params", {})


def inspect_checkpoint(namespace: argparse.Namespace) -> Answer:
    """Show the sidecar, the counters and the tensors of a checkpoint.

    Works on damaged, old and foreign files as far as they can be read. Tensors are
    not read, and objects of unknown types are named, never built.

    For a run's folder, shows the checkpoint from which fit would resume, or with
    --best the best one.

    Exit code 0: no fault was found in the structure. 1: there is one; the reason is
    printed after the state. 2: wrong usage.
    """
    from helios.checkpoint.outline import list_tensors, section

    path = find_checkpoint(namespace.path, takes_best=namespace.best)
    status, tree = look_into(path)
    sections = {key: section(tree, key) for key in _SECTIONS}
    tensors = [] if tree is None else list_tensors(tree)
    num_bytes = sum(each.num_bytes for each in tensors)
    document = {
        **_describe_status(status),
        **sections,
        "tensors": [vars(each) for each in tensors],
        "num_tensors": len(tensors),
        "num_bytes": num_bytes,
    }
    facts = {
        "file": path,
        "size": size_text(status.size),
        "state": status.state,
        "reason": status.reason,
        "starts": _starts(path.parent),
        **sections,
        **(document["sidecar"] or {}),
    }
    # What later starts compare themselves with is long, and not for people.
    facts["options"] = {name: x for name, x in facts["options"].items() if name != "found"}
    rows = [
        (each.path, each.dtype, str(list(each.shape)), size_text(each.num_bytes), each.note)
        for each in tensors
    ]
    lines = [
        *output.facts({name: output.value_text(x) for name, x in facts.items() if x is not None}),
        "",
        *output.table(_TENSOR_COLUMNS, rows),
        f"{len(tensors)} tensors, {size_text(num_bytes)}",
    ]
    return Answer(lines, document, status.is_good)


def verify_all(namespace: argparse.Namespace) -> Answer:
    """Verify every byte of checkpoints and ledgers.

    Checkpoints are compared with the digests in their sidecars, or with the
    checksums of their containers if there is no digest. Folders are searched
    recursively, except for files that were put aside: damaged files, and folders
    named before-*. Every line of a ledger must follow from the one before it, and
    every checkpoint must belong to it, with the digest and the scores that the run
    has recorded.

    Exit code 0: all are good. 1: at least one is not. 2: wrong usage, or a folder
    without checkpoints and ledgers.
    """
    root = existing(namespace.path)
    files, ledgers = _verify_place(root)
    if not files and not ledgers:
        raise ArgumentError(
            f"There is no checkpoint or ledger to verify in {root}. Pass a checkpoint, or the "
            "folder of a run."
        )
    is_good = all(x.is_good for x in files) and all(x.is_good for x in ledgers)
    lines = [*map(_show_verified, files), *(x for each in ledgers for x in _show_ledger(each))]
    document = {
        "root": root,
        "is_good": is_good,
        "files": [_describe_status(status) for status in files],
        "ledgers": [vars(each) | {"is_good": each.is_good} for each in ledgers],
    }
    return Answer(lines, document, is_good)


def _verify_place(root: Path) -> tuple[list[Status], list[LedgerStatus]]:
    if root.name == FILE_NAME:
        return [], [_verify_ledger(root)]
    if file_names.is_folder(root) or not root.is_dir():
        return [_verify_bytes(root)], []
    files: list[Status] = []
    ledgers = []
    for folder in survey(root, _verify_bytes, with_file=FILE_NAME):
        own = [part for part in folder.files if part.condition is not Condition.ASIDE]
        files += own
        is_marked = any(part.sidecar is not None and part.sidecar.ledger for part in own)
        if is_marked or (folder.path / FILE_NAME).exists():
            ledgers.append(_verify_ledger(folder.path / FILE_NAME, own))
    return files, ledgers


def _verify_bytes(path: Path) -> Status:
    with output.progress(path.name, total=path.stat().st_size) as bar:
        return examine(path, Depth.BYTES, bar.update)


def _verify_ledger(path: Path, files: Sequence[Status] = ()) -> LedgerStatus:
    """Verify a ledger, and that the checkpoints beside it belong to it."""
    if not path.is_file():
        return LedgerStatus(path, findings=["is missing"])
    sidecars = {part.path.name: part.sidecar for part in files if part.sidecar is not None}
    try:
        with output.progress(path.name, unit=" lines") as bar:
            return verify(path, sidecars, watch=lambda _: bar.update())
    except LedgerError as error:
        return LedgerStatus(path, findings=[str(error)])


def _show_verified(status: Status) -> str:
    if not status.is_good:
        return f"{status.state:10}  {status.reason}"
    note = "digest" if status.checked is Checked.DIGEST else "no digest to compare"
    return f"{status.state:10}  {status.path} ({note})"


def _show_ledger(found: LedgerStatus) -> list[str]:
    if not found.is_good:
        return [f"bad         {found.path}: {finding}" for finding in found.findings]
    begin = found.begins_after
    return [
        f"good        {found.path} (iterations {begin + 1} to {begin + found.num_iterations}, hash "
        f"{found.hash}; the run has {'' if found.has_ended else 'not '}ended; "
        f"{count_text(found.num_scored, 'validation')} with the scores of its checkpoints)"
    ]


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parsers of the commands."""
    ls = add("ls", list_folder)
    ls.add_argument("path", metavar="DIR", help="the folder of a run, or chkpt_root")
    inspect = add("inspect", inspect_checkpoint)
    inspect.add_argument("path", metavar="FILE|DIR", help="a checkpoint, or the folder of a run")
    inspect.add_argument("--best", action="store_true", help="the best checkpoint of the folder")
    verify = add("verify", verify_all)
    verify.add_argument("path", metavar="FILE|DIR", help="a checkpoint, a ledger, or a folder")

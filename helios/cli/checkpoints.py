"""``helios ls``, ``inspect`` and ``verify``: checkpoints, without the code that wrote them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.best import BestValidation
from helios.checkpoint import file_names
from helios.checkpoint.loading import Checked, Condition, Depth
from helios.checkpoint.reproducibility import list_missing
from helios.checkpoint.retention import Ranking, rank_files
from helios.checkpoint.sidecar import Sidecar
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
from helios.cli.output import Answer, Column, Command, argument
from helios.core.stored_values import list_values, stored_params
from helios.errors import ArgumentError, LedgerError, UsageError
from helios.ledger.book import FILE_NAME
from helios.ledger.run_facts import read_run
from helios.ledger.verification import LedgerStatus, verify
from helios.storage.local_paths import as_local_path
from helios.text import size_text, with_step

if TYPE_CHECKING:
    from helios.checkpoint.outline import Node


_LIST_COLUMNS = (
    Column(""),
    Column("file"),
    Column("epoch", is_right=True),
    Column("iteration", is_right=True),
    Column("size", is_right=True),
    Column("state"),
    Column("metrics", rank=1),
    Column("level", rank=3),
    Column("finished", rank=2),
)
_TREE_COLUMNS = (
    Column("tree"),
    Column("type", rank=1),
    Column("shape", rank=1),
    Column("size", is_right=True, rank=1),
    Column("value", rank=2),
)
_MAX_REASONS = 3
_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
_MARKS = {StartOutcome.RESUMES: "*", StartOutcome.REFUSES: "!", StartOutcome.FRESH: ""}
_DEPTH = 4
_INDENT = "  "
_MAX_VALUE = 60
_SECTIONS = (file_names.KEY_TRAINING_STATE, file_names.KEY_CURSOR, file_names.KEY_OPTIONS)
_SHOWN_APART = ("params", "found")
_HOW = {
    Checked.DIGEST: "digest",
    Checked.SUMS: "no digest to compare; the container's checksums match",
}


def list_folder(namespace: argparse.Namespace) -> Answer:
    """List the checkpoints of a run's folder, or of all runs below chkpt_root, or one.

    States: good, not verified (no fault so far, but not every byte was read),
    damaged, unmigrated (of helios-ml), newer (a later format), foreign (not a
    checkpoint of Helios), unreadable (disk or permissions), put aside (found
    damaged at an earlier start). A star marks the file from which fit would
    resume, an exclamation mark the one at which it would stop with an error.

    Without --verify, the container is checked, and that name and sidecar agree; the
    content is read only if there is no sidecar.
    """
    look = verify_bytes if namespace.verify else examine
    if not namespace.watch:
        return _Listing(namespace.path, look).result()
    if namespace.json:
        raise UsageError("--watch has no effect with --json. Omit one of them.")
    return Answer(_watch(lambda: _Listing(namespace.path, look).lines()), dict)


def _watch(make: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield lines again whenever they have changed, until Ctrl-C."""
    shown: list[str] | None = None
    try:
        while True:
            lines = list(make())
            if lines != shown:
                if sys.stdout.isatty():
                    sys.stdout.write(_CLEAR)
                elif shown is not None:
                    yield ""
                yield from lines
                sys.stdout.flush()
                shown = lines
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        return


class _Listing:
    """The checkpoints of a folder and of those below it, or a single one."""

    def __init__(self, place: str, look: Callable[[Path], Status]) -> None:
        self.root = as_local_path("FILE|DIR", place)
        self.is_single = file_names.is_folder(self.root) or not self.root.is_dir()
        if self.is_single:
            self.folders = [_list_one(output.existing_checkpoint(place), look)]
        else:
            self.folders = list(survey(self.root, look))

    def result(self) -> Answer:
        return Answer(self.lines(), self.as_dict)

    def as_dict(self) -> dict[str, Any]:
        return {"root": str(self.root), "folders": list(map(self._describe, self.folders))}

    def lines(self) -> Iterator[str]:
        if not self.folders:
            yield f"There are no checkpoints in {self.root}."
        for number, folder in enumerate(self.folders):
            if number:
                yield ""
            yield from self._show(folder)

    def _describe(self, folder: FolderStatus) -> dict[str, Any]:
        start = None if folder.start is None else str(folder.start)
        return {
            "path": str(folder.path),
            "is_moved_aside": folder.is_moved_aside,
            "start": None if folder.is_moved_aside else folder.outcome.value,
            "start_path": None if folder.is_moved_aside else start,
            "starts": _starts(folder.path),
            "params": stored_params(_newest_options(folder)),
            "best": None if self.is_single else _best_document(rank_files(folder.files)),
            "files": [output.status_document(status) for status in folder.files],
        }

    def _show(self, folder: FolderStatus) -> Iterator[str]:
        aside = "  (moved aside; starts ignore it)" if folder.is_moved_aside else ""
        yield f"{folder.path}{aside}"
        yield from output.facts({"starts": text} if (text := _starts(folder.path)) else {})
        yield from _values(folder)
        rows = [_list_row(status, folder) for status in folder.files]
        yield from output.table(_LIST_COLUMNS, rows, output.terminal_width())
        if folder.is_moved_aside:
            return
        if not self.is_single:
            yield from _best(folder)
        yield from _reasons(folder)
        yield from _losses(folder)
        if folder.outcome is StartOutcome.REFUSES and folder.start is None:
            yield "A start of fit stops with an error: all checkpoints here are damaged."


def _starts(folder: Path) -> str:
    """Return how often the run was started, and what became of its last start."""
    try:
        starts = read_run(folder).starts
    except LedgerError as error:
        return str(error)
    if not starts:
        return ""
    last = starts[-1]
    processes = f"{last.processes} process{'es' if last.processes > 1 else ''}"
    return f"{len(starts)}, the last one {last.time} on {last.host}, {processes}: {last.end}"


def _list_one(path: Path, look: Callable[[Path], Status]) -> FolderStatus:
    """Return what is known of one checkpoint, and what a start would do with its folder."""
    folder = examine_folder(path.parent)
    return dataclasses.replace(folder, files=(look(path),))


def _values(folder: FolderStatus) -> list[str]:
    """Return what the newest checkpoint says that the run is declared with."""
    params = stored_params(_newest_options(folder))
    return output.facts({"params": list_values(params)} if params else {})


def _newest_options(folder: FolderStatus) -> dict[str, Any]:
    sidecars = [each.sidecar for each in folder.files if each.sidecar is not None]
    return max(sidecars, key=lambda each: (each.epoch, each.iteration)).options if sidecars else {}


def _best(folder: FolderStatus) -> list[str]:
    """Return the best validation of the run, and the best checkpoint."""
    ranking = rank_files(folder.files)
    if ranking.best is None:
        return []
    if not ranking.lacks_best:
        return [f"best: {ranking.best}: {ranking.entries[0].path.name}"]
    name = "none" if ranking.path is None else ranking.path.name
    return [f"best: {ranking.best}, without a checkpoint; best checkpoint: {name}"]


def _best_document(ranking: Ranking) -> dict[str, Any] | None:
    if ranking.best is None:
        return None
    path = None if ranking.path is None else str(ranking.path)
    return {**ranking.best.as_plain(), "path": path, "has_checkpoint": not ranking.lacks_best}


def _reasons(folder: FolderStatus) -> list[str]:
    """Return why files are not good; equal reasons are listed a few times only."""
    lines: list[str] = []
    for condition in Condition:
        reasons = [part.reason for part in folder.files if part.condition is condition]
        if condition is Condition.ASIDE:
            continue
        lines += filter(None, reasons[:_MAX_REASONS])
        if condition is not Condition.GOOD and len(reasons) > _MAX_REASONS:
            lines.append(f"{len(reasons) - _MAX_REASONS} more are {condition.value}.")
    return lines


def _losses(folder: FolderStatus) -> list[str]:
    """Return what checkpoints lack, newest first; repeated only for the newest."""
    found: dict[str, str] = {}
    for status in reversed(folder.files):
        if status.sidecar is not None and status.sidecar.missing:
            found.setdefault(list_missing(status.sidecar.missing), status.path.name)
    texts = [f"{name} lacks {text}." for text, name in found.items()]
    return texts[:_MAX_REASONS]


def _list_row(status: Status, folder: FolderStatus) -> tuple[str, ...]:
    place = ("", "")
    if status.place is not None:
        epoch, iteration = status.place
        place = str(epoch), with_step(iteration, status.step)
    sidecar = status.sidecar
    is_start = status.path == folder.start and not folder.is_moved_aside
    return (
        _MARKS[folder.outcome] if is_start else "",
        status.path.name,
        *place,
        size_text(status.size),
        status.state,
        "" if sidecar is None else output.metrics_text(sidecar.metrics),
        "" if sidecar is None else ", ".join([sidecar.level, *sidecar.claims]),
        "" if sidecar is None else sidecar.finished or "",
    )


def inspect_checkpoint(namespace: argparse.Namespace) -> Answer:
    """Show the content of a checkpoint: its sidecar, its counters, and the tree of its
    tensors with types, shapes and sizes. Works on damaged, old and foreign files
    as far as they can be read. Tensors are not read, and objects of unknown types
    are named, never built.

    Of a run's folder, the checkpoint from which fit would resume is shown, or with
    --best the best one.

    Exit code 0: no fault was found, as far as the structure shows. 1: there is one;
    the reason is printed after the state. 2: wrong usage.
    """
    from helios.checkpoint.outline import outline

    path, _ = output.find_checkpoint(namespace.path, takes_best=namespace.best)
    status, tree = look_into(path)
    nodes = [] if tree is None else outline(tree)
    return Answer(
        _show_content(status, tree, nodes, namespace.depth),
        partial(_describe_content, status, tree, nodes),
        lambda: 0 if status.is_good else 1,
    )


def _describe_content(status: Status, tree: Any, nodes: list[Node]) -> dict[str, Any]:
    """Return everything; tensors by path, whatever the depth."""
    from helios.checkpoint.outline import section

    sidecar = status.sidecar
    return {
        **output.status_document(status),
        "sidecar": None if sidecar is None else dataclasses.asdict(sidecar),
        "keys": [node.path for node in nodes if len(node.keys) == 1],
        **{key: section(tree, key) for key in _SECTIONS},
        "tensors": [
            {
                "path": node.path,
                "dtype": node.dtype,
                "shape": list(node.shape),
                "bytes": node.num_bytes,
                "note": node.text,
            }
            for node in nodes
            if node.kind == "tensor"
        ],
        "num_tensors": nodes[0].num_tensors if nodes else 0,
        "num_bytes": nodes[0].num_bytes if nodes else 0,
    }


def _show_content(status: Status, tree: Any, nodes: list[Node], depth: int) -> Iterator[str]:
    from helios.checkpoint.outline import section

    facts = {
        "file": str(status.path),
        "size": size_text(status.size),
        "state": status.state,
        "reason": status.reason,
        "refers to": ", ".join(status.needs),
        **({} if status.sidecar is None else _sidecar_facts(status.sidecar)),
        **{key: _in_one_line(section(tree, key)) for key in _SECTIONS},
        "params": list_values(stored_params(_options_of(status.sidecar, tree))),
        "starts": _starts(status.path.parent),
    }
    yield from output.facts({name: text for name, text in facts.items() if text})
    if nodes:
        yield ""
        rows = [_tree_row(node) for node in nodes if _is_shown(node, depth)]
        yield from output.table(_TREE_COLUMNS, rows, output.terminal_width())
        total = size_text(nodes[0].num_bytes)
        yield f"{nodes[0].num_tensors} tensors, {total}"


def _options_of(sidecar: Sidecar | None, tree: Any) -> Mapping[str, Any]:
    if sidecar is not None:
        return sidecar.options
    found = tree.get(file_names.KEY_OPTIONS) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _sidecar_facts(sidecar: Sidecar) -> dict[str, str]:
    return {
        "run": sidecar.run_name,
        "place": f"epoch {sidecar.epoch}, iteration {with_step(sidecar.iteration, sidecar.step)}",
        "metrics": output.metrics_text(sidecar.metrics),
        "best": str(BestValidation.from_plain(sidecar.best) or ""),
        "averages": ", ".join(map(str, sidecar.averages)),
        "level": sidecar.level,
        "lacks": list_missing(sidecar.missing),
        "rests on": "; ".join(map(str, sidecar.claims)),
        "finished": sidecar.finished or "",
        "replicas": str(sidecar.num_replicas),
        "resumed from": sidecar.resumed_from or "",
        "changes": "; ".join(map(str, sidecar.changes)),
        "migrated": "" if sidecar.migrated_from is None else "from a file of helios-ml",
        "written by": f"Helios {sidecar.version}, format {sidecar.schema}",
        "digest": sidecar.digest,
    }


def _in_one_line(table: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {value}" for name, value in table.items() if name not in _SHOWN_APART
    )


def _is_shown(node: Node, depth: int) -> bool:
    is_in_facts = len(node.keys) > 1 and node.keys[0] in _SECTIONS
    return bool(node.keys) and not is_in_facts and (depth < 1 or len(node.keys) <= depth)


def _tree_row(node: Node) -> tuple[str, ...]:
    name = _INDENT * (len(node.keys) - 1) + (node.keys[-1] or "''")
    size = size_text(node.num_bytes) if node.num_tensors else ""
    if node.kind == "tensor":
        return (name, node.dtype, str(list(node.shape)), size, node.text)
    if node.kind == "value":
        text = node.text if len(node.text) <= _MAX_VALUE else f"{node.text[: _MAX_VALUE - 3]}..."
        return (name, "", "", "", text)
    count = f"{node.num_tensors} tensors" if node.num_tensors else ""
    return (name, node.text, count, size, "")


def verify_bytes(path: Path) -> Status:
    """Read all of a checkpoint, with a progress bar on a terminal."""
    with output.progress(path.name, output.size_of(path)) as watch:
        return examine(path, Depth.BYTES, watch)


def verify_all(namespace: argparse.Namespace) -> Answer:
    """Read checkpoints completely and compare them with the digests in their sidecars,
    or with the checksums of their containers if there is no digest. Folders are
    searched recursively, except for files that were put aside: damaged files, and
    folders named before-*. The ledger of a folder is read, too: every line must
    follow from the one before it, and every checkpoint must belong to it
    and have the scores and buffers that the run has recorded.

    Exit code 0: all are good. 1: at least one is not. 2: wrong usage, or a folder
    without checkpoints and ledgers.
    """
    given = as_local_path("FILE|DIR", namespace.path)
    root = given if given.is_dir() else output.existing_file(namespace.path)
    found = _Verification(root)
    return Answer(found.lines(), found.as_dict, lambda: 0 if found.is_good else 1)


class _Verification:
    """The result for a checkpoint, a ledger, or all of a folder; lines come as they are known."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Status] = []
        self.ledgers: list[LedgerStatus] = []

    @property
    def is_good(self) -> bool:
        return all(part.is_good for part in self.files) and all(
            each.is_good for each in self.ledgers
        )

    def as_dict(self) -> dict[str, Any]:
        for _ in self.lines():
            pass
        return {
            "root": str(self.root),
            "is_good": self.is_good,
            "files": [output.status_document(status) for status in self.files],
            "ledgers": [each.as_dict() for each in self.ledgers],
        }

    def lines(self) -> Iterator[str]:
        for part in _verify_parts(self.root):
            if isinstance(part, LedgerStatus):
                self.ledgers.append(part)
                yield from _ledger_lines(part)
            else:
                self.files.append(part)
                yield _verified_line(part)
        if not self.files and not self.ledgers:
            raise ArgumentError(
                f"There is no checkpoint or ledger to verify in {self.root}. Pass a checkpoint, or "
                "the folder of a run."
            )


def _verify_parts(root: Path) -> Iterator[Status | LedgerStatus]:
    if root.suffix == Path(FILE_NAME).suffix:
        yield _verify_ledger(root)
        return
    if file_names.is_folder(root) or not root.is_dir():
        yield verify_bytes(root)
        return
    seen: set[Path] = set()
    for folder in survey(root, verify_bytes, with_moved_aside=False):
        files = [part for part in folder.files if part.condition is not Condition.ASIDE]
        yield from files
        if any(_ledger_mark(part) for part in files) or (folder.path / FILE_NAME).exists():
            yield _verify_ledger(folder.path / FILE_NAME, files)
            seen.add(folder.path / FILE_NAME)
    for path in _find_ledgers(root):
        if path not in seen:
            yield _verify_ledger(path)


def _ledger_mark(part: Status) -> dict[str, Any] | None:
    return None if part.sidecar is None else part.sidecar.ledger


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


def _verify_ledger(path: Path, files: Sequence[Status] = ()) -> LedgerStatus:
    """Verify a ledger, and that the checkpoints beside it belong to it."""
    if not path.is_file():
        return LedgerStatus(path, findings=["is missing"])
    try:
        with output.progress(path.name, unit=" lines") as watch:
            return verify(path, **_list_statements(path, files), watch=lambda line: watch(1))
    except LedgerError as error:
        return LedgerStatus(path, findings=[str(error)])


def _list_statements(ledger: Path, files: Sequence[Status]) -> dict[str, Any]:
    """Return what checkpoints say of the ledger beside them, for :func:`verify`."""
    if not files:
        return {}
    sidecars = {part.path.name: part.sidecar for part in files if part.sidecar is not None}
    newest = files[-1].sidecar
    return {
        "marks": {name: each.ledger for name, each in sidecars.items() if each.ledger is not None},
        "digests": {name: each.digest for name, each in sidecars.items() if each.digest},
        "ended_at": newest.ledger if newest is not None and newest.finished else None,
        "scores": {part.path.name: _find_scores(part) for part in files},
        "hash_buffers": partial(_hash_buffers, ledger.parent),
    }


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


def _verified_line(status: Status) -> str:
    if not status.is_good:
        return f"{status.state:10}  {status.reason}"
    needs = f"; refers to {', '.join(status.needs)}" if status.needs else ""
    return f"{status.state:10}  {status.path} ({_HOW[status.checked]}{needs})"


COMMANDS = {
    "ls": Command(
        list_folder,
        argument(
            "path", metavar="FILE|DIR", help="folder of a run, or chkpt_root; or a checkpoint"
        ),
        argument("--verify", action="store_true", help="read all files, compare their digests"),
        argument(
            "--watch",
            action="store_true",
            help=f"look every {_SECONDS:g} s, and list again when something has changed",
        ),
    ),
    "inspect": Command(
        inspect_checkpoint,
        argument("path", metavar="FILE|DIR", help="a checkpoint, or the folder of a run"),
        argument("--best", action="store_true", help="the best checkpoint of the folder"),
        argument(
            "--depth",
            type=int,
            default=_DEPTH,
            metavar="N",
            help=f"levels of the tree to show; 0 for all (default: {_DEPTH})",
        ),
    ),
    "verify": Command(
        verify_all,
        argument("path", metavar="FILE|DIR", help="a checkpoint, or a folder of them"),
    ),
}

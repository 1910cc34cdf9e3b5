"""What a command is, and its output: aligned tables for people, one JSON document for programs.

Names come from files of unknown origin: non-printable characters are escaped, so that no file can
move the cursor of a terminal or forge a line.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.retention import Ranking, rank_files
from helios.checkpoint.sidecar import json_value
from helios.checkpoint.status import FolderStatus, Status, examine_folder
from helios.errors import ArgumentError, CheckpointError
from helios.storage.local_paths import as_local_path
from helios.text import number_text

_GAP = "  "
_MIN_TEXT = 20
_SECONDS = 0.2


def _return_zero() -> int:
    return 0


@dataclass(frozen=True)
class Answer:
    """What a command has found or done, which prints itself.

    Attributes:
        lines: the text for people; each line is printed as soon as it is known.
        document: returns the JSON document for programs; ``None`` if another process prints.
        exit_code: returns the exit code, after either of them.
    """

    lines: Iterable[str]
    document: Callable[[], Mapping[str, Any]] | None
    exit_code: Callable[[], int] = _return_zero

    def show(self, *, as_json: bool) -> int:
        """Print it, and return the exit code."""
        if as_json and self.document is not None:
            print_json(self.document())
        if not as_json:
            print_lines(self.lines)
        return self.exit_code()


Argument = tuple[tuple[str, ...], Mapping[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument of a command, as ``ArgumentParser.add_argument`` takes it."""
    return names, options


class Command:
    """A command: what it takes, and what it does.

    Args:
        run: does the work; what is wrong is an error that names the remedy. Its docstring is the
            help text.
        arguments: all but ``--json``, which every command has.
        usage: the usage line, where that of argparse differs between versions of Python.
    """

    def __init__(
        self,
        run: Callable[[argparse.Namespace], Answer],
        *arguments: Argument,
        usage: str | None = None,
    ) -> None:
        self._run = run
        self._arguments = arguments
        self._usage = usage

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the help and the arguments of the command."""
        parser.description, parser.usage = inspect.getdoc(self._run), self._usage
        for names, options in self._arguments:
            parser.add_argument(*names, **options)
        text = "print one JSON document instead of text"
        parser.add_argument("--json", action="store_true", help=text)
        parser.set_defaults(run=self._run)


def existing_file(path: str) -> Path:
    """Return the path of an existing file.

    Raises:
        ArgumentError: if there is none, or it is not a regular file, which might have no end.
    """
    found = as_local_path("FILE", path)
    if not found.is_file():
        if found.is_dir():
            raise ArgumentError(f"{path} must be a file, but it is a folder. Pass a file in it.")
        raise ArgumentError(f"No such file: {path}.")
    return found


def existing_checkpoint(path: str) -> Path:
    """Return the path of an existing checkpoint, a file or a folder.

    Raises:
        ArgumentError: as :func:`existing_file`.
    """
    found = as_local_path("FILE", path)
    return found if file_names.is_folder(found) and found.is_dir() else existing_file(path)


def existing_folder(path: str) -> Path:
    """Return the path of an existing folder.

    Raises:
        ArgumentError: if there is none.
    """
    found = as_local_path("DIR", path)
    if not found.is_dir():
        if found.is_file():
            raise ArgumentError(f"{path} must be a folder, but it is a file. Pass its folder.")
        raise ArgumentError(f"No such folder: {path}.")
    return found


def find_checkpoint(place: str, *, takes_best: bool) -> tuple[Path, Ranking | None]:
    """Return a checkpoint that is named, or the one of a run's folder that counts.

    Args:
        place: a checkpoint, or the folder of a run.
        takes_best: whether to take the best one of the folder, not the one that a start of ``fit``
            would resume from.

    Returns:
        The checkpoint; the good ones of the folder by their scores, if the best one was asked for.

    Raises:
        ArgumentError: if there is none.
        CheckpointError: if nothing says which one is the best, or none has a score.
    """
    if takes_best:
        return _find_best(existing_folder(place))
    path = as_local_path("FILE|DIR", place)
    if file_names.is_folder(path) or not path.is_dir():
        return existing_checkpoint(place), None
    folder = _examine_run(path)
    return folder.start or folder.files[-1].path, None


def _examine_run(path: Path) -> FolderStatus:
    folder = examine_folder(path)
    if not folder.files:
        raise ArgumentError(
            f"There is no checkpoint directly in {path}. Pass a checkpoint, or the folder of a run "
            "(helios ls lists those below a folder)."
        )
    return folder


def _find_best(root: Path) -> tuple[Path, Ranking]:
    ranking = rank_files(_examine_run(root).files)
    if ranking.rule is None:
        raise CheckpointError(
            f"Nothing says which checkpoint in {root} is the best: no KeepBest, no single "
            "EarlyStopping, and no have_metrics_improved of the model. Pass a file."
        )
    if ranking.path is None:
        best = "" if ranking.best is None else f" The best validation: {ranking.best}."
        raise CheckpointError(f"No checkpoint in {root} has a score.{best} Pass a file.")
    return ranking.path, ranking


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or of the files in a folder; ``None`` if unknown."""
    try:
        parts = path.iterdir() if path.is_dir() else [path]
        return sum(part.stat().st_size for part in parts)
    except OSError:
        return None


@contextlib.contextmanager
def progress(
    what: str, total: int | None = None, *, unit: str = "B"
) -> Iterator[Callable[[int], object]]:
    """Show on a terminal how far something is, for a block; nothing anywhere else.

    Args:
        what: what is read or written.
        total: its size; ``None`` if it is not known.
        unit: what is counted.

    Yields:
        A function to call with what is done.
    """
    if not sys.stderr.isatty():
        yield _ignore
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread

    divisor = 1024 if unit == "B" else 1000
    with Bar(
        desc=what,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=divisor,
        leave=False,
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def growth(draft: Path, what: str, total: int) -> Iterator[None]:
    """Show on a terminal how much of a file or folder is written meanwhile, for a block.

    Args:
        draft: where it is written; need not exist yet.
        what: its name.
        total: the bytes that it will have, about.
    """
    with progress(what, total) as watch:
        if watch is _ignore:
            yield
            return
        is_over = threading.Event()

        def follow() -> None:
            shown = 0
            while not is_over.wait(_SECONDS):
                size = size_of(draft) or shown
                watch(size - shown)
                shown = size

        follower = threading.Thread(target=follow, daemon=True, name="helios-progress")
        follower.start()
        try:
            yield
        finally:
            is_over.set()
            follower.join()


def _ignore(count: int) -> None:
    """Take no notice."""


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text; characters that the terminal does not support are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        text = printable(line).encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(f"{text.rstrip()}\n")


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document; numbers that JSON does not support become text."""
    sys.stdout.write(json.dumps(json_value(document), indent=2, allow_nan=False) + "\n")


def printable(text: str) -> str:
    """Return a text in which all non-printable characters are escaped.

    Example:
        >>> printable("a" + chr(27) + "b") == "a" + chr(92) + "x1bb"
        True
    """
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text
    )


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return scores in one line."""
    return " ".join(f"{name}={number_text(value, 4)}" for name, value in metrics.items())


def terminal_width() -> int | None:
    """Return the width of the terminal; ``None`` if the output does not go to one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def facts(texts: Mapping[str, str], width: int | None = None) -> list[str]:
    """Return the lines of a list of names with texts; long ones are wrapped.

    Args:
        texts: by name.
        width: maximum width of the lines; ``None`` for that of the terminal.
    """
    width = width or terminal_width()
    margin = max(map(len, texts), default=0) + len(_GAP)
    lines = []
    for name, text in texts.items():
        room = None if width is None else max(_MIN_TEXT, width - margin)
        parts = [printable(text)] if room is None else _wrap(printable(text), room)
        lines.append(name.ljust(margin) + (parts[0] if parts else ""))
        lines += [" " * margin + part for part in parts[1:]]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    # A truncated path or digest could not be copied.
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        is_right: whether its cells are right-aligned, as numbers are.
        rank: columns with higher ranks are omitted first on a narrow terminal; 0 is never omitted.
    """

    title: str
    is_right: bool = False
    rank: int = 0


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Return the lines of a table; columns without any content are omitted.

    Args:
        columns: the columns.
        rows: a cell for each column.
        width: maximum width of the lines; ``None`` for any width. Cells are not truncated: columns
            are omitted, those of the highest rank first.
    """
    widths = [
        max(len(printable(text)) for text in (column.title, *(row[number] for row in rows)))
        for number, column in enumerate(columns)
    ]
    shown = [
        number
        for number, column in enumerate(columns)
        if column.rank == 0 or any(row[number] for row in rows)
    ]
    while width is not None and _width(shown, widths) > width:
        last = max(shown, key=lambda number: columns[number].rank)
        if columns[last].rank == 0:
            break
        shown.remove(last)
    titles = [column.title for column in columns]
    return [
        _GAP.join(_cell(row[n], widths[n], columns[n]) for n in shown).rstrip()
        for row in (titles, *rows)
    ]


def _width(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[number] for number in shown) + len(_GAP) * (len(shown) - 1)


def _cell(text: str, width: int, column: Column) -> str:
    text = printable(text)
    return text.rjust(width) if column.is_right else text.ljust(width)


def status_document(status: Status) -> dict[str, Any]:
    """Return the facts about one file, under the keys of ``--json``."""
    epoch, iteration = status.place or (None, None)
    sidecar = status.sidecar
    return {
        "path": str(status.path),
        "state": status.state,
        "reason": status.reason,
        "size": status.size,
        "epoch": epoch,
        "iteration": iteration,
        "step": status.step,
        "checked": status.checked.value,
        "needs": list(status.needs),
        "run_name": None if sidecar is None else sidecar.run_name,
        "metrics": {} if sidecar is None else sidecar.metrics,
        "level": None if sidecar is None else sidecar.level,
        "missing": {} if sidecar is None else sidecar.missing,
        "claims": [] if sidecar is None else sidecar.claims,
        "finished": None if sidecar is None else sidecar.finished,
        "is_migrated": None if sidecar is None else sidecar.migrated_from is not None,
    }

"""Output of the commands: aligned tables for people, one JSON document for programs.

Names come from files of unknown origin: non-printable characters are escaped, so that no file can
move the cursor of a terminal or forge a line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.sidecar import json_value
from helios.checkpoint.status import Status
from helios.core.local_paths import as_local_path
from helios.core.text import number_text, with_step
from helios.errors import ArgumentError
from helios.ledger.differences import LineComparison

_GAP = "  "
_MIN_TEXT = 20
_MOST_SHOWN = 20


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


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
        raise ArgumentError(f"No such folder: {path}.")
    return found


def print_lines(*lines: str) -> None:
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
        "state": status.condition.value,
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
        "is_migrated": None if sidecar is None else sidecar.is_migrated,
    }


def comparison_lines(found: LineComparison) -> list[str]:
    """Return which scores are equal, and what was not compared, as lines of text."""
    count = found.num_scored
    scored = [f"equal: the scores of {count} validation{'s' if count > 1 else ''}"] if count else []
    return [*scored, *found.not_compared]


def difference_lines(found: LineComparison) -> list[str]:
    """Return the first iteration that differs, in what, and possible causes, as lines of text."""
    begin = "they differ at the latest" if found.may_begin_earlier else "different"
    assert found.iteration is not None
    place = with_step(found.iteration, found.steps.get("iteration"))
    lines = [f"{begin} from iteration {place} on, first in: {found.what[0]}"]
    if found.what[1:]:
        lines.append(f"then in: {', '.join(found.what[1:])}")
    if found.tensors:
        rest = len(found.tensors) - 1
        lines.append(f"first tensor: {found.tensors[0]}" + (f", and {rest} more" if rest else ""))
    lines += [
        f"  {name}: {_show(one)} | {_show(other)}" for name, (one, other) in found.details.items()
    ]
    return [*lines, "possible causes:", *(f"  - {cause}" for cause in found.causes)]


def _show(value: Any) -> str:
    if isinstance(value, dict):
        shown = [f"{name} {number!r}" for name, number in islice(value.items(), _MOST_SHOWN)]
        rest = len(value) - len(shown)
        return ", ".join([*shown, f"and {rest} more"] if rest else shown)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return "-" if value is None else str(value)

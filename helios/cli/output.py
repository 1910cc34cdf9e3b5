"""The output of commands: aligned lines for people, or one JSON document for programs.

Names come from files of unknown origin: non-printable characters are escaped, so that no file can
move the cursor of a terminal or forge a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from helios.text import json_value

if TYPE_CHECKING:
    from tqdm import tqdm

_GAP = "  "
MOST_SHOWN = 40


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        lines: the text for people.
        document: the JSON document for programs; ``None`` if another process prints it.
        is_good: whether the exit code is 0, not 1.
    """

    lines: Iterable[str]
    document: Mapping[str, Any] | None
    is_good: bool = True

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        if not as_json:
            for line in self.lines:
                sys.stdout.write(f"{printable(line).rstrip()}\n")
        elif self.document is not None:
            # Numbers that JSON does not support become text.
            text = json.dumps(json_value(self.document), indent=2, allow_nan=False)
            sys.stdout.write(f"{text}\n")


def printable(text: str) -> str:
    """Return a text in which characters are escaped that do not belong on the terminal.

    Example:
        >>> printable("a" + chr(27) + "b") == "a" + chr(92) + "x1bb"
        True
    """
    escaped = (x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
    encoding = sys.stdout.encoding or "utf-8"
    return "".join(escaped).encode(encoding, "backslashreplace").decode(encoding)


def value_text(value: Any) -> str:
    """Return a plain value in one line; of a long table only the first entries."""
    if isinstance(value, Mapping):
        shown = [f"{name} {each!r}" for name, each in islice(value.items(), MOST_SHOWN)]
        rest = len(value) - len(shown)
        return ", ".join([*shown, f"and {rest} more"] if rest else shown)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def warn(text: str) -> None:
    """Print a warning beside the output."""
    sys.stderr.write(f"helios: warning: {printable(text)}\n")


def facts(texts: Mapping[str, str]) -> list[str]:
    """Return a line for each name that has a text."""
    width = max(map(len, texts), default=0)
    return [f"{name:{width}}{_GAP}{text}" for name, text in texts.items() if text]


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; columns without any content are left out.

    Args:
        columns: titles, and how cells are aligned: ``"<"`` or ``">"``.
        rows: a cell for each column.
    """
    lines = [""] * (len(rows) + 1)
    for number, (title, side) in enumerate(columns.items()):
        cells = [title, *(row[number] for row in rows)]
        if any(cells[1:]):
            width = max(map(len, cells))
            lines = [f"{x}{_GAP}{cell:{side}{width}}" for x, cell in zip(lines, cells, strict=True)]
    return [line.removeprefix(_GAP) for line in lines]


def progress(
    what: str, parts: Sequence[Any] = (), *, total: int | None = None, unit: str = "B"
) -> tqdm[Any]:
    """Return a bar that shows on a terminal how far something is; it shows nothing elsewhere.

    Args:
        what: what is read or written.
        parts: what the bar passes on one by one, if it is used as an iterator.
        total: its size, otherwise; ``None`` if that is not known.
        unit: what is counted.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread

    return Bar(parts, desc=what, total=total, unit=unit, unit_scale=True, leave=False, disable=None)

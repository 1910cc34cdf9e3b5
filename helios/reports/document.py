"""A document is Markdown with pictures: what both consist of, and how they are written.

Pictures are sentences in the Markdown file; :mod:`helios.reports.page` wraps all of it into HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from helios.core.text import number_text

MOST_ROWS = 200
"""The most rows of a table."""
MOST_CHARACTERS = 600
"""The most characters of a text that a run has written."""
NO_HEAD = ("", "")
"""The heading of a table of names with values."""
OPEN, ANSWERED, BLANK = "- [ ] ", "- [x] ", "\\_" * 12
"""How questions of a checklist begin, and how one without an answer ends."""
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
_ESCAPED = re.compile(r"\\([\\`*_\[\]<>|#~$])")


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        points: place and value of each point, in the order of places.
        band: place, least and largest value; empty for a line without a band.
        has_dots: whether each point is marked.
        name: the run that it belongs to, where there are several; may be empty.
        ends: the first and the last number, which the points may have merged with others; ``None``
            without any.
    """

    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    has_dots: bool = False
    name: str = ""
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """A chart over iterations.

    Attributes:
        title: what it shows.
        lines: the numbers.
        span: the first and the last iteration.
        marks: iterations after which the run was started again, and whether it was killed before.
        note: a sentence below it; may be empty.
    """

    title: str
    lines: Sequence[Line]
    span: tuple[float, float]
    marks: Sequence[tuple[int, bool]] = ()
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """Numbers of several runs in one row of a picture.

    Attributes:
        name: the group of runs.
        numbers: one for each run.
        mean: their mean.
        interval: the interval of the mean; ``None`` if there are too few.
    """

    name: str
    numbers: Sequence[float]
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Spread:
    """A picture of groups of numbers: each run, the mean and its interval."""

    title: str
    samples: Sequence[Sample]


Block = str | Chart | Spread
"""Markdown without empty lines, or a picture."""


@dataclass
class Chapter:
    """A heading with blocks below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    """A title with sections.

    Attributes:
        title: the heading.
        kind: what kind of document it is, in a few words.
        sections: in their order.
    """

    title: str
    kind: str
    sections: list[Chapter] = field(default_factory=list)


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text without what is too much of it."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more)"


def shorten_rows(
    rows: Sequence[tuple[str, str]], most: int = MOST_CHARACTERS
) -> list[tuple[str, str]]:
    """Return the first rows, with texts that are not too long."""
    return [(name, shorten(value, most)) for name, value in rows[:MOST_ROWS]]


def write_markdown(document: Document) -> str:
    """Return the text of the Markdown file; as :func:`helios.reports.page.write_page`."""
    parts = [f"# {write_text(document.title)}", write_text(document.kind)]
    for section in document.sections:
        parts.append(f"## {write_text(section.title)}")
        parts += map(_write_block, section.blocks)
    # Names of files may hold bytes that are no text.
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace").decode()


def _write_block(block: Block) -> str:
    return block if isinstance(block, str) else _describe_chart(block)


def write_text(text: str) -> str:
    """Return a text as Markdown, in which nothing of it is markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def read_text(markdown: str) -> str:
    """Return the text of which :func:`write_text` made Markdown.

    Example:
        >>> read_text(write_text("a_b <c>"))
        'a_b <c>'
    """
    return _ESCAPED.sub(r"\1", markdown)


def write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; with :data:`NO_HEAD`, one of names with values."""
    rule = _write_row(["---"] * len(head))
    return "\n".join([_write_cells(head), rule, *map(_write_cells, rows)])


def _write_cells(cells: Sequence[str]) -> str:
    return _write_row(list(map(write_text, cells)))


def _write_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read_table(markdown: str) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of what :func:`write_table` has written."""
    head, _, *rows = (
        list(map(read_text, line[2:-2].split(" | "))) for line in markdown.splitlines()
    )
    return head, rows


def write_checklist(topics: Mapping[str, Mapping[str, str | None]]) -> Iterator[str]:
    """Yield questions by topic; those without an answer get a line that the author fills in."""
    for topic, questions in topics.items():
        yield f"### {write_text(topic)}"
        yield "\n".join(
            f"{OPEN}{write_text(question)} {BLANK}"
            if answer is None
            else f"{ANSWERED}{write_text(question)} {write_text(answer)}"
            for question, answer in questions.items()
        )


def _describe_chart(block: Chart | Spread) -> str:
    if isinstance(block, Spread):
        numbers = "; ".join(
            f"{each.name}: {', '.join(map(number_text, each.numbers))}" for each in block.samples
        )
        return f"{write_text(block.title)}: {write_text(numbers)}."
    text = "; ".join(map(_describe_line, block.lines))
    return f"{write_text(block.title)}: {text}. {write_text(block.note)}".rstrip()


def _describe_line(line: Line) -> str:
    name = f"{write_text(line.name)} " if line.name else ""
    if not line.points:
        return f"{name}no numbers"
    values = [y for _, low, high in line.band for y in (low, high)] or [y for _, y in line.points]
    ends = "" if line.ends is None else "from {} to {}, ".format(*map(number_text, line.ends))
    return f"{name}{ends}between {number_text(min(values))} and {number_text(max(values))}"

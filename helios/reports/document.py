"""A document of sections: what it consists of, and how it is written as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from helios.core.text import number_text

MOST_ROWS = 200
"""The most rows of a table."""
MOST_CHARACTERS = 600
"""The most characters of a text that a run has written."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"text": self.text}


@dataclass(frozen=True)
class Facts:
    """Names with values, line by line."""

    rows: Sequence[tuple[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"facts": dict(self.rows)}


@dataclass(frozen=True)
class Grid:
    """A table with a heading for each column."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"head": list(self.head), "rows": [list(row) for row in self.rows]}


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

    def as_dict(self) -> dict[str, Any]:
        """Return what it shows in plain values, without its points."""
        return {"chart": self.title, "note": self.note}


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

    def as_dict(self) -> dict[str, Any]:
        """Return what it shows in plain values."""
        return {"chart": self.title}


@dataclass(frozen=True)
class Question:
    """A question of a checklist.

    Attributes:
        text: the question.
        answer: what is known; ``None`` for a line that the author fills in.
    """

    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Checklist:
    """Questions by topic."""

    topics: Sequence[tuple[str, Sequence[Question]]]

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {
            "checklist": {
                topic: {each.text: each.answer for each in questions}
                for topic, questions in self.topics
            }
        }


Block = Text | Facts | Grid | Chart | Spread | Checklist


@dataclass
class Chapter:
    """A heading with blocks below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"title": self.title, "blocks": [block.as_dict() for block in self.blocks]}


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

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        sections = [section.as_dict() for section in self.sections]
        return {"title": self.title, "kind": self.kind, "sections": sections}


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text without what is too much of it."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more)"


def shorten_rows(
    rows: Sequence[tuple[str, str]], most: int = MOST_CHARACTERS
) -> list[tuple[str, str]]:
    """Return the first rows, with texts that are not too long."""
    return [(name, shorten(value, most)) for name, value in rows[:MOST_ROWS]]


_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
_BLANK = "\\_" * 12


def write_markdown(document: Document) -> str:
    """Return the text of the Markdown file; as :func:`helios.reports.page.write_page`."""
    parts = [f"# {_escape(document.title)}", _escape(document.kind)]
    for section in document.sections:
        parts.append(f"## {_escape(section.title)}")
        parts += map(_write_block, section.blocks)
    # Names of files may hold bytes that are no text.
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace").decode()


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _write_block(block: Block) -> str:
    if isinstance(block, Text):
        return _escape(block.text)
    if isinstance(block, Facts):
        return _write_grid(("", ""), block.rows)
    if isinstance(block, Grid):
        return _write_grid(block.head, block.rows)
    if isinstance(block, Checklist):
        return _write_checklist(block)
    return _write_chart(block)


def _write_grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell if number == 1 else _escape(cell) for cell in row)} |"
        for number, row in enumerate(lines)
    )


def _write_chart(block: Chart | Spread) -> str:
    if isinstance(block, Spread):
        numbers = "; ".join(
            f"{each.name}: {', '.join(map(number_text, each.numbers))}" for each in block.samples
        )
        return f"{_escape(block.title)}: {_escape(numbers)}."
    text = "; ".join(map(_describe_line, block.lines))
    return f"{_escape(block.title)}: {text}. {_escape(block.note)}".rstrip()


def _describe_line(line: Line) -> str:
    name = f"{_escape(line.name)} " if line.name else ""
    if not line.points:
        return f"{name}no numbers"
    values = [y for _, low, high in line.band for y in (low, high)] or [y for _, y in line.points]
    ends = "" if line.ends is None else "from {} to {}, ".format(*map(number_text, line.ends))
    return f"{name}{ends}between {number_text(min(values))} and {number_text(max(values))}"


def _write_checklist(block: Checklist) -> str:
    parts = []
    for topic, questions in block.topics:
        parts.append(f"### {_escape(topic)}")
        parts.append("\n".join(map(_write_question, questions)))
    return "\n\n".join(parts)


def _write_question(question: Question) -> str:
    if question.answer is None:
        return f"- [ ] {_escape(question.text)} {_BLANK}"
    return f"- [x] {_escape(question.text)} {_escape(question.answer)}"

"""Writes a document as Markdown, for the appendix of a paper; charts become sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

from helios.core.text import number_text
from helios.ledger.summary.document import (
    Block,
    Chart,
    Checklist,
    Document,
    Facts,
    Grid,
    Question,
    Spread,
    Text,
)

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
_BLANK = "\\_" * 12


def write_markdown(document: Document) -> str:
    """Return the text of the Markdown file."""
    parts = [f"# {_escape(document.title)}", _escape(document.kind)]
    for section in document.sections:
        parts.append(f"## {_escape(section.title)}")
        parts += map(_write_block, section.blocks)
    return "\n\n".join(parts) + "\n"


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
    points = block.line.points
    if not points:
        return f"{_escape(block.title)}: no numbers. {_escape(block.note)}".rstrip()
    values = [y for _, low, high in block.line.band for y in (low, high)]
    values = values or [y for _, y in points]
    text = f"between {number_text(min(values))} and {number_text(max(values))}"
    if block.ends is not None:
        first, last = map(number_text, block.ends)
        text = f"from {first} to {last}, {text}"
    note = f" {_escape(block.note)}" if block.note else ""
    return f"{_escape(block.title)}: {text}.{note}"


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

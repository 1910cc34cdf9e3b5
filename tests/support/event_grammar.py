"""Pseudocode of what a run tells, as the docstrings of ``Trainer.fit`` and its kin hold it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from helios.hooks.events import EVENTS

_TOLD = re.compile(r"([\w.]+)\((.*)\)")
_ONE_LINE = re.compile(r"((?:if|for each) [^:]+:) (.+)")
_INDENT = "    "


@dataclasses.dataclass(frozen=True)
class Node:
    """A line of pseudocode and what stands below it."""

    text: str
    body: tuple[Node, ...] = ()

    @property
    def name(self) -> str:
        """The event that is told or the method that is called; empty for other lines."""
        found = _TOLD.fullmatch(self.text)
        return found.group(1) if found else ""

    def walk(self) -> Iterator[Node]:
        """Yield the line and all below it."""
        yield self
        for child in self.body:
            yield from child.walk()


def pseudocode_of(function: Callable[..., object]) -> str:
    """Return the literal block of a docstring, without its indentation."""
    lines = (inspect.getdoc(function) or "").splitlines()
    start = next(place for place, line in enumerate(lines) if line.endswith("::")) + 2
    block = []
    for line in lines[start:]:
        if line and not line.startswith(_INDENT):
            break
        block.append(line.removeprefix(_INDENT))
    return "\n".join(block).rstrip()


def parse(text: str) -> tuple[Node, ...]:
    """Read pseudocode; blank lines do not count."""
    lines = [line for line in text.splitlines() if line.strip()]
    return tuple(_parse(lines))


def _parse(lines: Sequence[str]) -> Iterator[Node]:
    while lines:
        first, depth = lines[0].strip(), _depth(lines[0])
        size = 1
        while size < len(lines) and _depth(lines[size]) > depth:
            size += 1
        one_line = _ONE_LINE.fullmatch(first)
        if one_line:
            yield Node(one_line.group(1), (Node(one_line.group(2)),))
        else:
            yield Node(first, tuple(_parse(lines[1:size])))
        lines = lines[size:]


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def unparse(nodes: Iterable[Node], depth: int = 0) -> str:
    """Write nodes as pseudocode; events with the arguments of the table."""
    text = ""
    for node in nodes:
        event = EVENTS.get(node.name)
        line = node.text if event is None else f"{event.name}({', '.join(event.parameters)})"
        is_short = node.text.startswith("if ") and len(node.body) == 1 and not node.body[0].body
        if is_short:
            text += f"{_INDENT * depth}{line} {unparse(node.body)}"
        else:
            text += f"{_INDENT * depth}{line}\n{unparse(node.body, depth + 1)}"
    return text

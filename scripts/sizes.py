"""Show how large each room of the package is. Nothing depends on it: sizes decide nothing."""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
from collections.abc import Iterable, Mapping

from tests import house

_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclasses.dataclass
class Size:
    """What a file, a room or the package consists of."""

    num_files: int = 0
    code_lines: int = 0
    docstring_lines: int = 0
    num_functions: int = 0
    longest_function: tuple[int, str] = (0, "")
    longest_file: tuple[int, str] = (0, "")

    def __add__(self, other: Size) -> Size:
        return Size(
            self.num_files + other.num_files,
            self.code_lines + other.code_lines,
            self.docstring_lines + other.docstring_lines,
            self.num_functions + other.num_functions,
            max(self.longest_function, other.longest_function),
            max(self.longest_file, other.longest_file),
        )


def measure(path: str, text: str) -> Size:
    """Measure a file: lines of code are those without docstrings, comments and blank lines."""
    docstrings = {
        line
        for node in house.nodes(text)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    filled = {
        line
        for token in tokens
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    found = house.functions(path, text)
    return Size(
        1,
        len(filled - docstrings),
        len(docstrings),
        len(found),
        max(((each.lines, each.name) for each in found), default=(0, "")),
        (len(text.splitlines()), path),
    )


def by_room(files: Mapping[str, str]) -> dict[str, Size]:
    """Measure the rooms, in the order of the table of rooms, and the whole package."""
    sizes = dict.fromkeys([*house.ROOMS, house.FACADE], Size())
    for path, text in files.items():
        sizes[house.room_of(path)] += measure(path, text)
    return {**sizes, "all": sum(sizes.values(), Size())}


def render(sizes: Mapping[str, Size]) -> str:
    """Return the sizes as a table."""
    titles = ("", "files", "code", "docstrings", "functions", "longest function", "longest file")
    rows = [titles, *(_row(name, size) for name, size in sizes.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_line(row, widths) for row in rows)


def _row(name: str, size: Size) -> tuple[str, ...]:
    numbers = (size.num_files, size.code_lines, size.docstring_lines, size.num_functions)
    longest = (size.longest_function, size.longest_file)
    return (name, *(f"{each:,}" for each in numbers), *(f"{n:4} {where}" for n, where in longest))


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    cells = [
        cell.rjust(width) if 0 < column < 5 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip() + "\n"


if __name__ == "__main__":
    print(render(by_room(house.source_files())), end="")

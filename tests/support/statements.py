"""What Helios must do, the tests that are marked to show it, and the page that is made of both.

``tests/statements.toml`` has a table for each statement: ``says`` is its sentence; ``waits`` and
``obsolete`` give the reason why no test shows it, or shows only a part; ``note`` is what else is
to be known. A test carries ``@pytest.mark.shows("H13")``, with all numbers that it shows. A test
that is skipped, expected to fail, or kept for ``scripts/test --all`` shows nothing on the machine
that runs the default tier, so it may not be marked.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
_COUNTS = {"H": 66, "L": 47, "K": 45, "R": 49, "C": 18, "E": 43, "S": 77, "P": 151}
_DEMANDS = (2, 3, 10, 12, 13, 14, 17, *range(21, 38))
NUMBERS = [
    *(f"{letter}{number}" for letter, count in _COUNTS.items() for number in range(1, count + 1)),
    *(f"U{number}" for number in _DEMANDS),
]
"""All statements that there are."""

_BARRED = {"skip", "skipif", "xfail", "full", "gpu"}
_LEAVING = {"pytest.skip", "pytest.xfail", "pytest.importorskip"}
_TEST_FILE = re.compile(r"tests/[\w/]+\.py")
_TABLE = "| | statement | shown by |\n|---|---|---|\n"


@dataclasses.dataclass(frozen=True)
class Statement:
    says: str
    note: str = ""
    waits: str = ""
    obsolete: str = ""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A test that is marked, and what is wrong with that, if anything."""

    test: str
    numbers: Sequence[str]
    fault: str = ""


def read_statements(text: str) -> dict[str, Statement]:
    """Return the statements of ``tests/statements.toml`` by their numbers."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {number: Statement(**table) for number, table in tables.items()}


def statements() -> dict[str, Statement]:
    return read_statements((ROOT / "tests" / "statements.toml").read_text("utf-8"))


@functools.cache
def marked_tests(root: Path = ROOT) -> tuple[Shown, ...]:
    """Return the tests below ``tests`` that are marked, by file and in the order of the files."""
    found: list[Shown] = []
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text("utf-8")
        if "mark.shows" in text:
            found += _marked_in(path.relative_to(root).as_posix(), ast.parse(text))
    return tuple(found)


def _marked_in(path: str, tree: ast.Module) -> Iterator[Shown]:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    count = sum(name == "shows" for name in _marks(tree))
    for name, function in functions.items():
        for decorator in function.decorator_list:
            if "shows" not in _marks(decorator):
                continue
            count -= 1
            numbers = _numbers(decorator)
            fault = "" if numbers else "says no numbers."
            if not name.startswith("test_"):
                fault = "is no test."
            yield Shown(f"{path}::{name}", numbers, fault or _what_bars(function, functions, tree))
    if count:
        yield Shown(path, (), "marks something else than a test.")


def _numbers(decorator: ast.expr) -> list[str]:
    """Return what a mark names; nothing where that cannot be read."""
    if not isinstance(decorator, ast.Call) or decorator.keywords:
        return []
    values = [arg.value for arg in decorator.args if isinstance(arg, ast.Constant)]
    return list(map(str, values)) if len(values) == len(decorator.args) else []


def _what_bars(
    test: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], tree: ast.Module
) -> str:
    """Say why the default tier does not run a test; empty where it does."""
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for expression in [*test.decorator_list, *filter(None, [assigned.get("pytestmark")])]:
        if marks := _barring_marks(expression, assigned):
            return f"is marked {', '.join(sorted(marks))}."
    used = [functions[a.arg] for a in test.args.args if a.arg in functions]
    return "may skip itself." if any(_leaves(function) for function in (test, *used)) else ""


def _barring_marks(expression: ast.expr, assigned: Mapping[str, ast.expr]) -> set[str]:
    if isinstance(expression, ast.Name):
        known = assigned.get(expression.id)
        return set() if known is None else _barring_marks(known, {})
    if isinstance(expression, ast.Call) and set(_marks(expression.func)) == {"parametrize"}:
        return _marks_of_all_cases(expression, assigned)
    return set(_marks(expression)) & _BARRED


def _marks_of_all_cases(call: ast.Call, assigned: Mapping[str, ast.expr]) -> set[str]:
    """Return what bars every case of a parametrization; one that runs is enough."""
    cases = call.args[1] if len(call.args) > 1 else None
    if isinstance(cases, ast.Name):
        cases = assigned.get(cases.id)
    if not isinstance(cases, (ast.List, ast.Tuple)):
        return set()
    found = [set(_marks(case)) & _BARRED for case in cases.elts]
    if not found:
        return {"parametrize without cases"}
    return set().union(*found) if all(found) else set()


def _marks(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, (ast.Attribute, ast.Name)):
            owner = part.value.attr if isinstance(part.value, ast.Attribute) else part.value.id
            if owner == "mark":
                yield part.attr


def _leaves(function: ast.FunctionDef) -> bool:
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) in _LEAVING for call in calls)


def faults(known: Mapping[str, Statement], shown: Iterable[Shown], root: Path) -> list[str]:
    """Say what is wrong with statements and marks: each statement has a test or a reason."""
    shown = list(shown)
    found = [f"{number} is missing." for number in NUMBERS if number not in known]
    found += [f"{number} is no statement." for number in known if number not in NUMBERS]
    found += [f"{each.test} {each.fault}" for each in shown if each.fault]
    named = [(each.test, number) for each in shown for number in each.numbers]
    found += [f"{test} shows {n}, which is no statement." for test, n in named if n not in known]
    evident = {number for _, number in named}
    for number, statement in known.items():
        if not statement.says.strip():
            found.append(f"{number} does not say what it states.")
        if number not in evident and not (statement.waits or statement.obsolete).strip():
            found.append(f"{number} has neither a test nor 'waits' or 'obsolete'.")
        paths = _TEST_FILE.findall(statement.note)
        found += [f"{number} names {p}: no such file." for p in paths if not (root / p).is_file()]
    return found


def page() -> str:
    """Return the table of statements and of the tests that show them."""
    tests: dict[str, list[str]] = {}
    for shown in marked_tests():
        for number in shown.numbers:
            tests.setdefault(number, []).append(f"`{shown.test}`")
    text = _TABLE
    for number, statement in statements().items():
        parts = [", ".join(tests.get(number, [])), statement.note]
        parts += [f"obsolete: {statement.obsolete}"] if statement.obsolete else []
        parts += [f"waits: {statement.waits}"] if statement.waits else []
        text += f"| {number} | {statement.says} | {'; '.join(filter(None, parts))} |\n"
    return text


if __name__ == "__main__":
    print(page())

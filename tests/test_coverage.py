"""docs/coverage.md: every statement once, and every test that it cites exists and runs.

A test that is skipped, expected to fail, or kept for ``scripts/test --all`` shows nothing on the
machine that runs the default tier, so it may not be cited.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import parse

_ROOT = Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "coverage.md"
_ROW = re.compile(r"^\| ([HLKERCSUP]\d+) \| (.*) \| (.*) \|$", re.MULTILINE)
_CITED = re.compile(r"`([^`]*::[^`]*)`")
_TEST_ID = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")
_REASON = re.compile(r"\b(?:waits|obsolete): \S")
_COUNTS = {"H": 66, "L": 42, "K": 42, "E": 43, "R": 49, "C": 18, "S": 74, "P": 117}
_DEMANDS = (2, 3, 10, 12, 13, 14, 17, *range(21, 31))
_STATEMENTS = [
    *(f"{letter}{number}" for letter, count in _COUNTS.items() for number in range(1, count + 1)),
    *(f"U{number}" for number in _DEMANDS),
]
_BARRED = {"skip", "skipif", "xfail", "full", "gpu"}
_LEAVING = {"skip", "xfail", "importorskip"}


def row_faults(page: str) -> list[str]:
    """Statements that are missing, doubled, unknown, or without evidence."""
    rows = _ROW.findall(page)
    counts = Counter(name for name, _, _ in rows)
    faults = [f"{name} is missing." for name in _STATEMENTS if not counts[name]]
    faults += [f"{name} is listed {count} times." for name, count in counts.items() if count > 1]
    faults += [f"{name} is no statement." for name in counts if name not in _STATEMENTS]
    for name, paraphrase, evidence in rows:
        if not paraphrase.strip():
            faults.append(f"{name} does not say what it states.")
        if not _CITED.search(evidence) and not _REASON.search(evidence):
            faults.append(f"{name} has neither a test nor 'waits: …' or 'obsolete: …'.")
    return faults


def citation_faults(page: str, root: Path) -> list[str]:
    """Cited tests that do not exist, or that the default tier does not run."""
    faults = []
    for cited in sorted(set(_CITED.findall(page))):
        parts = _TEST_ID.fullmatch(cited)
        if parts is None:
            faults.append(f"{cited} is no 'tests/….py::test_…'.")
            continue
        path, name = parts.groups()
        text = (root / path).read_text("utf-8") if (root / path).is_file() else ""
        if fault := fault_of(text, name):
            faults.append(f"{cited} {fault}")
    return faults


def fault_of(text: str, name: str) -> str:
    """Say why a file's test is not there or does not run; empty where it runs."""
    tree = parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        return "does not exist."
    test = functions[name]
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    expressions = [*test.decorator_list, *filter(None, [assigned.get("pytestmark")])]
    for expression in expressions:
        if marks := _barring_marks(expression, assigned):
            return f"is marked {', '.join(sorted(marks))}."
    used = [functions[a.arg] for a in test.args.args if a.arg in functions]
    if any(_leaves(function) for function in (test, *used)):
        return "may skip itself."
    return ""


def _barring_marks(expression: ast.expr, assigned: dict[str, ast.expr]) -> set[str]:
    if isinstance(expression, ast.Name):
        known = assigned.get(expression.id)
        return set() if known is None else _barring_marks(known, {})
    if isinstance(expression, ast.Call) and set(_marks(expression.func)) == {"parametrize"}:
        return _marks_of_all_cases(expression, assigned)
    return set(_marks(expression)) & _BARRED


def _marks_of_all_cases(call: ast.Call, assigned: dict[str, ast.expr]) -> set[str]:
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
        if isinstance(part, ast.Attribute) and ast.unparse(part.value).split(".")[-1] == "mark":
            yield part.attr


def _leaves(function: ast.FunctionDef) -> bool:
    names = {f"pytest.{name}" for name in _LEAVING}
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) in names for call in calls)


@pytest.fixture(scope="module", autouse=True)
def files_are_parsed_once() -> Iterator[None]:
    """Forget the parsed files at the end, which every garbage collection would visit."""
    yield
    parse.cache_clear()


def test_every_statement_is_listed_once_with_its_evidence() -> None:
    assert row_faults(_PAGE.read_text("utf-8")) == []


def test_every_cited_test_exists_and_runs() -> None:
    assert citation_faults(_PAGE.read_text("utf-8"), _ROOT) == []


def _page(**evidence: str) -> str:
    rows = dict.fromkeys(_STATEMENTS, "waits: for its turn") | evidence
    return "".join(f"| {name} | says something | {text} |\n" for name, text in rows.items())


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (_page(H67="waits: for ever"), "H67 is no statement."),
        (_page(K43="waits: for ever"), "K43 is no statement."),
        (_page(E44="waits: for ever"), "E44 is no statement."),
        (_page(S75="waits: for ever"), "S75 is no statement."),
        (_page(U4="waits: for ever"), "U4 is no statement."),
        (_page(H5="shown elsewhere"), "H5 has neither a test nor 'waits: …' or 'obsolete: …'."),
        (_page(H5="waits:"), "H5 has neither a test nor 'waits: …' or 'obsolete: …'."),
        (_page() + "| H5 | again | waits: for ever |\n", "H5 is listed 2 times."),
        (_page().replace("| L29 |", "| - |"), "L29 is missing."),
        (_page().replace("| R49 |", "| - |"), "R49 is missing."),
        (_page().replace("| E43 |", "| - |"), "E43 is missing."),
        (_page().replace("| H66 | says something |", "| H66 |  |"), "H66 does not say"),
    ],
)
def test_a_statement_without_its_row_is_seen(page: str, fault: str) -> None:
    assert row_faults(_page()) == []
    (found,) = row_faults(page)
    assert found.startswith(fault)


_HEAD = "import pytest\n"
_TEST = "def test_it(tmp_path): assert tmp_path\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (_TEST.replace("test_it", "test_that"), "does not exist."),
        ("", "does not exist."),
        (f"class TestIt:\n    {_TEST}", "does not exist."),
        (f"@pytest.mark.skip\n{_TEST}", "is marked skip."),
        (f"@pytest.mark.skipif(True, reason='no')\n{_TEST}", "is marked skipif."),
        (f"@pytest.mark.xfail\n{_TEST}", "is marked xfail."),
        (f"@pytest.mark.full\n{_TEST}", "is marked full."),
        (f"pytestmark = [pytest.mark.gpu]\n{_TEST}", "is marked gpu."),
        (f"needs = pytest.mark.skipif(True, reason='no')\n@needs\n{_TEST}", "is marked skipif."),
        (f"@pytest.mark.parametrize('n', [])\n{_TEST}", "is marked parametrize without cases."),
        (
            f"@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.full)])\n{_TEST}",
            "is marked full.",
        ),
        (_TEST.replace("assert tmp_path", "pytest.skip('no')"), "may skip itself."),
        (
            "@pytest.fixture\ndef tmp_path():\n    pytest.importorskip('none')\n" + _TEST,
            "may skip itself.",
        ),
    ],
)
def test_a_citation_of_a_test_that_does_not_run_is_seen(
    text: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(_HEAD + text)
    page = _page(H5="`tests/test_a.py::test_it`")
    assert citation_faults(page, tmp_path) == [f"tests/test_a.py::test_it {fault}"]


@pytest.mark.parametrize(
    "text",
    [
        _TEST,
        f"@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.full)])\n{_TEST}",
        f"@pytest.mark.parametrize('n', NUMBERS)\n@pytest.mark.usefixtures('f')\n{_TEST}",
        f"skip = 1\n@pytest.mark.timeout(5)\n{_TEST}\n@pytest.mark.full\ndef test_other(): ...\n",
    ],
)
def test_a_citation_of_a_test_that_runs_passes(text: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(_HEAD + text)
    assert citation_faults(_page(H5="`tests/test_a.py::test_it`"), tmp_path) == []


@pytest.mark.parametrize(
    "cited", ["tests/test_a.py::it", "test_a.py::test_it", "tests/test_a.py::test_it[1]"]
)
def test_a_citation_that_is_no_test_id_is_seen(cited: str, tmp_path: Path) -> None:
    assert citation_faults(_page(H5=f"`{cited}`"), tmp_path) == [
        f"{cited} is no 'tests/….py::test_…'."
    ]

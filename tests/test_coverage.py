"""Each statement has a test that runs, or a reason; tests/support/statements.py prints both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import statements
from tests.support.statements import NUMBERS, ROOT, Shown, Statement


def test_every_statement_has_a_test_that_runs_or_a_reason() -> None:
    known, shown = statements.statements(), statements.marked_tests()
    assert statements.faults(known, shown, ROOT) == []


_WAITING = Statement(says="something", waits="for its turn")


def _known(**changes: Statement) -> Mapping[str, Statement]:
    return dict.fromkeys(NUMBERS, _WAITING) | changes


def _faults(known: Mapping[str, Statement], *shown: Shown) -> list[str]:
    return statements.faults(known, shown, ROOT)


@pytest.mark.parametrize(
    ("known", "fault"),
    [
        (_known(H67=_WAITING), "H67 is no statement."),
        (_known(H5=Statement("a")), "H5 has neither a test nor 'waits' or 'obsolete'."),
        ({name: _WAITING for name in NUMBERS if name != "L29"}, "L29 is missing."),
    ],
)
def test_a_statement_without_evidence_is_seen(known: Mapping[str, Statement], fault: str) -> None:
    assert _faults(_known()) == []
    assert _faults(known) == [fault]


_MARK = "@pytest.mark.shows('H5')\n"
_TEST = f"{_MARK}def test_it(tmp_path): assert tmp_path\n"


def _shown_by(text: str, root: Path) -> list[Shown]:
    (root / "tests").mkdir()
    (root / "tests" / "test_a.py").write_text(f"import pytest\n{text}")
    return list(statements.marked_tests(root))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"@pytest.mark.skip\n{_TEST}", "is marked skip."),
        (f"@pytest.mark.full\n{_TEST}", "is marked full."),
        (_TEST.replace("assert tmp_path", "pytest.skip('no')"), "may skip itself."),
    ],
)
def test_a_mark_that_shows_nothing_is_seen(text: str, fault: str, tmp_path: Path) -> None:
    (shown,) = _shown_by(text, tmp_path)
    assert (shown.test, shown.fault) == ("tests/test_a.py::test_it", fault)
    assert f"{shown.test} {fault}" in _faults(_known(), shown)

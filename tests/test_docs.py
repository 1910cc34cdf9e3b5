"""The Python of the README and the docs runs, each page from top to bottom."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.warned import collect_warnings

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OF_STATE = re.compile("incomplete|has no state_dict|train_step changes|cannot be saved|is missing")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = _BLOCK.findall(page.read_text())
    if not blocks:
        return
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    codes = []
    with collect_warnings() as warnings:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            codes.append(leaving.code)
    assert codes in ([], [0])
    assert [warning for warning in warnings if _OF_STATE.search(warning)] == []


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [
        link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()
    ]
    assert not missing

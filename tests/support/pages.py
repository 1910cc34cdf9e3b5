"""Pages of the documentation whose Python blocks are run, and whose text blocks show the output."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.warned import collect_warnings

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = ("report.md", "tutorials/differences.md")
"""The pages whose outputs tests compare, so that no other test needs to run them."""
OF_STATE = re.compile("incomplete|has no state_dict|train_step changes|cannot be saved|is missing")
"""Warnings that the code of no page may cause."""
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown_texts(page: str) -> str:
    """Return the text blocks of a page in ``SHOWN``."""
    return "".join(text for kind, text in _blocks(page) if kind == "text")


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python blocks of a page in ``SHOWN`` as one script."""
    script = folder / "page.py"
    script.write_text("\n".join(text for kind, text in _blocks(page) if kind == "python"))
    monkeypatch.chdir(folder)
    with collect_warnings() as warnings:
        runpy.run_path(str(script), run_name="__main__")
    assert [warning for warning in warnings if OF_STATE.search(warning)] == []


def _blocks(page: str) -> list[tuple[str, str]]:
    assert page in SHOWN
    return _BLOCK.findall((DOCS / page).read_text("utf-8"))

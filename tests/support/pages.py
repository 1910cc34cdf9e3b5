"""Pages of the documentation whose Python blocks are run, and whose text blocks show the output."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the Python blocks of a page as one script in a folder; returns its text blocks."""
    blocks = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    script = folder / "page.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"))
    monkeypatch.chdir(folder)
    runpy.run_path(str(script), run_name="__main__")
    return "".join(text for kind, text in blocks if kind == "text")

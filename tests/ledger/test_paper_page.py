"""The page on what to hand in with a paper shows what its commands print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "report.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Results differ between processors, and with them the widths of columns.
_NUMBER = re.compile(r"sha256:\w+|-?\d+\.?\d*(?:e-?\d+)?%?")


def _plain(text: str) -> list[str]:
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines()]


def test_the_outputs_on_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = _BLOCK.findall(PAGE.read_text("utf-8"))
    script = tmp_path / "page.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    shown = "".join(text for kind, text in blocks if kind == "text")
    lines = capsys.readouterr().out.splitlines(keepends=True)
    # What the tests of this process have imported is packed, too.
    printed = "".join(line for line in lines if not line.startswith("note: code/"))
    assert _plain(printed)[: len(shown.splitlines())] == _plain(shown)
    assert (tmp_path / "appendix.md").read_text("utf-8").startswith("# batch-8-seed-1\n")
    assert "<!DOCTYPE html>" in (tmp_path / "comparison.html").read_text("utf-8")

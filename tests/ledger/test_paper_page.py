"""The page on what to hand in with a paper shows what its commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import run_page

# Results differ between processors, and with them the widths of columns; the size of a pack
# depends on what the tests of this process have imported.
_NUMBER = re.compile(r"sha256:\w+|-?\d+\.?\d*(?:e-?\d+)?(?:%| [KM]iB)?")


def _plain(text: str) -> list[str]:
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines()]


@pytest.mark.shows("P49", "P80")
def test_the_outputs_on_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_page("report.md", tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines(keepends=True)
    # What the tests of this process have imported is packed, too.
    printed = "".join(line for line in lines if not line.startswith("note: code/"))
    assert _plain(printed)[: len(shown.splitlines())] == _plain(shown)
    assert (tmp_path / "appendix.md").read_text("utf-8").startswith("# batch-8-seed-1\n")
    assert "<!DOCTYPE html>" in (tmp_path / "comparison.html").read_text("utf-8")

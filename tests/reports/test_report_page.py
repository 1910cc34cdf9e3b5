"""The page on reports shows what its commands print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.pages import run_page, shown_texts

# Results differ between processors, and with them the widths of columns.
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?%?")


def _plain(text: str) -> list[str]:
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines()]


def run_report() -> None:
    """Run the page in the folder that the command line names."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_page("logging.md", Path(sys.argv[1]), monkeypatch)


@pytest.mark.shows("P49", "P80")
def test_the_outputs_on_the_page_are_real(tmp_path: Path) -> None:
    done = scripts.call(run_report, tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    shown = shown_texts("logging.md")
    assert _plain(printed)[: len(shown.splitlines())] == _plain(shown)
    assert (tmp_path / "curves.png").stat().st_size > 1_000

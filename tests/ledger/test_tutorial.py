"""The recipe on differences shows what its commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import run_page, shown_texts

# Losses differ between processors.
_LOSS = re.compile(r"(?<=loss )\d[\w.+-]*")


@pytest.mark.shows("P12", "P80")
def test_the_outputs_on_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("recipes/differences.md", tmp_path, monkeypatch)
    printed = _LOSS.sub("#", capsys.readouterr().out)
    assert printed.startswith(shown_texts("recipes/differences.md"))
    assert re.search(r"equal: \d+ tensors\ntensors that differ: \d+, such as\n  model\.", printed)

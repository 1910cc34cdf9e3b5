"""The tutorial on differences shows what its commands print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "differences.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Losses differ between processors.
_LOSS = re.compile(r"(?<=loss )\d[\w.+-]*")


def test_the_outputs_on_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = _BLOCK.findall(PAGE.read_text("utf-8"))
    script = tmp_path / "page.py"
    script.write_text("\n".join(text for kind, text in blocks if kind == "python"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    shown = "".join(text for kind, text in blocks if kind == "text")
    printed = _LOSS.sub("#", capsys.readouterr().out)
    assert printed.startswith(shown)
    assert re.search(r"equal: \d+ tensors\ntensors that differ: \d+, first model\.", printed)

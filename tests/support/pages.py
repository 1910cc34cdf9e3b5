"""Pages of the documentation whose code is run, and what they show of the output."""

from __future__ import annotations

import itertools
import math
import re
import runpy
from pathlib import Path

import pytest

from tests.support.warned import collect_warnings

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = ("logging.md", "recipes/differences.md")
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


_STAMP = re.compile(r"^[\d-]{10} [\d:,]{12} - ")
_BY_TIME = "INFO - step "
"""Begins a line that a slow machine logs every 30 seconds."""
_SECONDS = re.compile(r"\bin (\d+\.\d s|\d+:\d\d:\d\d)$")
_BEST = re.compile(r"the best so far|best: \w+ \S+ \(iteration \d+\)|\(iteration \d+; \S+\.pth\)")
_DECIMAL = re.compile(r"\d+\.\d+")
_ANY = "..."
"""Stands for lines that a page leaves out."""


def shown_commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands (``$ python train.py``) that a page shows, and what they print there."""
    found: list[tuple[str, list[str]]] = []
    for kind, text in _BLOCK.findall(page.read_text("utf-8")):
        if kind == "text" and text.startswith("$ "):
            for line in text.splitlines():
                if line.startswith("$ "):
                    found.append((line[2:], []))
                else:
                    found[-1][1].append(line)
    return found


def check_printed(shown: list[str], printed: str) -> None:
    """Assert that a command prints what a page shows of it.

    Times differ. Scores and losses may differ by some percent, as those of another processor do,
    and so may the validation that is the best one. All else is the same.
    """
    lines = [_STAMP.sub("", line) for line in printed.splitlines()]
    lines = [line for line in lines if not line.startswith(_BY_TIME)]
    place = 0
    for is_gap, group in itertools.groupby(shown, _ANY.__eq__):
        if is_gap:
            continue
        part = list(group)
        last = len(lines) - len(part) if shown[0] == _ANY or place else 0
        starts = range(place, last + 1)
        fits = [n for n in starts if all(map(_is_same, part, lines[n:]))]
        assert fits, f"{part} is not in {lines[place:]}"
        place = fits[0] + len(part)
    assert shown[-1] == _ANY or place == len(lines), lines[place:]


def _is_same(shown: str, printed: str) -> bool:
    texts = [_BEST.sub("(best)", _SECONDS.sub("in ...", line)) for line in (shown, printed)]
    if len({_DECIMAL.sub("0.0", text) for text in texts}) > 1:
        return False
    numbers = (map(float, _DECIMAL.findall(text)) for text in texts)
    return all(math.isclose(*pair, rel_tol=0.05) for pair in zip(*numbers, strict=True))

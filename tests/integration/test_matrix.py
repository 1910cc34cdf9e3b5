"""The matrix of state: every kind of value, in every place, changed at every time.

Each cell trains, is cut off, builds everything anew and resumes. What training changed is there
again, or the checkpoint that lacks it names it. The golden file says which of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.matrix import cells
from tests.support.matrix.cells import CELLS, Cell

GOLDEN = dict(cells.parse(cells.GOLDEN.read_text("utf-8")))


def _tier(cell: Cell) -> Any:
    marks = () if cells.is_in_slice(cell) else (pytest.mark.full,)
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.shows("S41", "S58")
@pytest.mark.parametrize("cell", [_tier(cell) for cell in CELLS])
def test_what_training_changed_is_saved_or_named(cell: Cell, tmp_path: Path) -> None:
    assert cells.play(cell, tmp_path) == GOLDEN[cell]


@pytest.mark.shows("S41")
def test_the_golden_file_loses_nothing_and_names_only_what_cannot_be_saved() -> None:
    assert list(GOLDEN) == CELLS
    wrong = {str(cell): found for cell, found in GOLDEN.items() if found != cells.wanted(cell)}
    assert wrong == {}

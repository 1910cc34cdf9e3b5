"""The matrix of state: every kind of value, in every place, changed at every time.

Each cell trains, is cut off, builds everything anew and resumes. What training changed is there
again, or the checkpoint that lacks it names it. The golden file says which of both.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helios.state import TrainingState
from tests.support.kills import kill_self, run_in_child
from tests.support.matrix import cells
from tests.support.matrix.cells import CELLS, TIMES, Cell
from tests.support.matrix.owners import OWNERS
from tests.support.quiet import Quiet

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


class _Kill(Quiet):
    """Ends the process, as a power cut would, when an iteration begins."""

    def __init__(self, iteration: int) -> None:
        super().__init__("kill")
        self.iteration = iteration

    def on_training_batch_start(self, state: TrainingState) -> None:
        if state.global_iteration == self.iteration:
            kill_self()


_VALUES_OF_KILLS = (
    *("int", "deque", "enum", "dataclass", "view of an array", "view of a tensor"),
    *("alias", "choice", "torch.Generator", "numpy Generator", "object with state_dict", "tensor"),
)
_KILLED = [
    Cell(OWNERS[number % len(OWNERS)], value, tuple(TIMES)[number % 3])
    for number, value in enumerate(_VALUES_OF_KILLS)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cell", _KILLED, ids=str)
def test_what_training_changed_is_there_again_after_a_kill(cell: Cell, tmp_path: Path) -> None:
    whole = cells.train(cell, tmp_path / "whole")
    folder = tmp_path / "killed"
    since = TIMES[cell.time][1]
    work = partial(cells.train, cell, folder)
    killed = run_in_child(partial(work, _Kill(since + 1)), tmp_path / "first")
    assert killed == -signal.SIGKILL
    assert cells.checkpoint_after(folder, since).exists()
    assert run_in_child(work, tmp_path / "second") == os.EX_OK
    assert cells.end_of(tmp_path / "second") == whole.end

"""The matrix of decisions: where a run ends, saves, validates and leaves out an update.

Every decision, in every event, some counted by steps and others by epochs, on one replica and on
several, in one process and in several. The golden file says what follows; a line holds for every
number of processes, unless it names one.
"""

from __future__ import annotations

import pytest

from tests.support import decision_cells as table
from tests.support import decisions
from tests.support.decision_cells import CELLS, GROUPS, Cell

PARTS = 4
LINES = decisions.parse(decisions.GOLDEN.read_text("utf-8"))


def _differences(cells: list[Cell], num_processes: int) -> list[str]:
    return [
        f"{decisions.name_of(cell, num_processes)}: {found}\n"
        f"  expected: {decisions.expected(LINES, cell, num_processes)}"
        for cell, found in decisions.play(cells, num_processes).items()
        if found != decisions.expected(LINES, cell, num_processes)
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("num_replicas", "num_processes"), GROUPS)
def test_what_follows_a_decision_is_in_the_golden_file(
    num_replicas: int, num_processes: int, part: int
) -> None:
    cells = table.cells_of(num_replicas, num_processes)[part::PARTS]
    assert not _differences(cells, num_processes)


def test_every_event_that_a_plugin_or_the_model_hears_is_in_the_matrix() -> None:
    played = {cell.event for cell in CELLS}
    assert played | set(table.UNHEARD) == table.heard_events() | {"prepare_data"}

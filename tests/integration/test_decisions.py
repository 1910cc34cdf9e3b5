"""The matrix of decisions: where a run ends, saves, validates and leaves out an update.

Every decision, in every event, some counted by steps and others by epochs, on one replica and on
several, in one process and in several. The golden file says what follows; a line holds for every
number of processes, unless it names one.
"""

from __future__ import annotations

import pytest

from tests.support import decision_cells as table
from tests.support import decisions
from tests.support.decision_cells import CELLS, GROUPS, STOP_ITERATION, Cell

PARTS = 12
LINES = decisions.parse(decisions.GOLDEN.read_text("utf-8"))


def _differences(cells: list[Cell], num_processes: int) -> list[str]:
    return [
        f"{decisions.name_of(cell, num_processes)}: {found}\n"
        f"  expected: {decisions.expected(LINES, cell, num_processes)}"
        for cell, found in decisions.play(cells, num_processes).items()
        if found != decisions.expected(LINES, cell, num_processes)
    ]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("num_replicas", "num_processes"), GROUPS)
def test_what_follows_a_decision_is_in_the_golden_file(
    num_replicas: int, num_processes: int, part: int
) -> None:
    cells = table.cells_of(num_replicas, num_processes)[part::PARTS]
    assert not _differences(cells, num_processes)


def test_the_golden_file_has_a_line_for_each_cell() -> None:
    names = {str(cell) for cell in CELLS}
    assert names <= set(LINES)
    assert {name.split(" / P=")[0] for name in LINES} == names


def test_the_number_of_processes_decides_nothing_but_what_is_refused_on_several() -> None:
    """A hook that ends an epoch by StopIteration is an error where several processes train."""
    others = {name: outcome for name, outcome in LINES.items() if " / P=" in name}
    assert {name.split(" / ")[0] for name in others} == {STOP_ITERATION}
    assert all(outcome.startswith("UsageError at") for outcome in others.values())
    assert not [outcome for outcome in LINES.values() if " BUT " in outcome]


def test_every_event_that_a_plugin_or_the_model_hears_is_in_the_matrix() -> None:
    played = {cell.event for cell in CELLS}
    assert played | set(table.UNHEARD) == table.heard_events() | {"prepare_data"}

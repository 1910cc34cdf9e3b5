"""The matrix of decisions: where a run ends, saves, validates and leaves out an update.

Every decision, in every event, counted by steps and by epochs, on one replica and on several, in
one process and in several. The golden file says what follows; a line holds for every number of
processes, unless it names one.
"""

from __future__ import annotations

import pytest

from tests.support import decision_cells as table
from tests.support import decisions
from tests.support.decision_cells import CELLS, GROUPS, KINDS, STOP_ITERATION, Cell

LINES = decisions.parse(decisions.GOLDEN.read_text("utf-8"))


def _differences(cells: list[Cell], num_processes: int) -> list[str]:
    return [
        f"{decisions.name_of(cell, num_processes)}: {found}\n"
        f"  expected: {decisions.expected(LINES, cell, num_processes)}"
        for cell, found in decisions.play(cells, num_processes).items()
        if found != decisions.expected(LINES, cell, num_processes)
    ]


@pytest.mark.parametrize(("num_replicas", "num_processes"), GROUPS)
def test_what_follows_a_decision_is_in_the_golden_file(
    num_replicas: int, num_processes: int
) -> None:
    cells = table.slice_of(num_replicas, num_processes)
    assert not _differences(cells, num_processes)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_replicas", "num_processes"), GROUPS)
def test_what_follows_every_decision_is_in_the_golden_file(
    num_replicas: int, num_processes: int, kind: str
) -> None:
    cells = [cell for cell in table.cells_of(num_replicas, num_processes) if cell.kind == kind]
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


def test_the_number_of_replicas_decides_nothing_but_when_a_wish_of_a_save_is_heard() -> None:
    """What is asked for in on_save_checkpoint is heard at once, or at the next boundary."""
    found: dict[Cell, set[str]] = {}
    for cell in CELLS:
        outcome, _, _ = LINES[str(cell)].partition(", weight")
        found.setdefault(cell._replace(num_replicas=0), set()).add(outcome)
    others = [cell for cell, outcomes in found.items() if len(outcomes) > 1]
    assert {cell.event for cell in others} == {"on_save_checkpoint"}
    assert {cell.kind for cell in others} == {table.REQUEST_STOP, table.INTERRUPT}


def test_every_event_that_a_plugin_or_the_model_hears_is_in_the_matrix() -> None:
    played = {cell.event for cell in CELLS}
    assert played | set(table.UNHEARD) == table.heard_events() | {"prepare_data"}


def test_the_default_tier_has_cells_of_each_kind_and_event() -> None:
    for part in ("kind", "event", "moment"):
        alone = {getattr(c, part) for v in (1, 2, 3) for c in table.slice_of(v, 1)}
        assert alone == {getattr(cell, part) for cell in CELLS}
    together = {cell.kind for group in GROUPS if group[1] > 1 for cell in table.slice_of(*group)}
    assert together >= set(KINDS) - {table.FAILED_WRITE_CONTINUED, table.EARLY_STOP}

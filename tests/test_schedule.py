"""What is due when: tables over both units and several accumulations."""

from __future__ import annotations

import math

import pytest

from helios.schedule import (
    Schedule,
    ends_window,
    find_limit,
    is_limit,
    is_total_reached,
)
from helios.state import Cursor, TrainingState, TrainingUnit

EPOCH, ITERATION = TrainingUnit.EPOCH, TrainingUnit.ITERATION


@pytest.mark.shows("H39", "L29", "C7")
@pytest.mark.parametrize(
    ("unit", "accumulation", "is_manual", "boundaries"),
    [
        (EPOCH, 2, False, [2, 4, 5, 7, 9, 10]),
        (EPOCH, 3, False, [3, 5, 8, 10]),
        (EPOCH, 3, True, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (ITERATION, 3, False, [3, 6, 9]),
        (ITERATION, 3, True, [3, 6, 9]),
    ],
)
def test_windows_end_where_the_design_says(
    unit: TrainingUnit, accumulation: int, is_manual: bool, boundaries: list[int]
) -> None:
    """Two epochs of five batches, with partial windows."""
    schedule = Schedule(unit=unit, total_steps=math.inf, accumulation_steps=accumulation)
    ends = [
        batch + 5 * epoch + 1
        for epoch in range(2)
        for batch in range(5)
        if ends_window(
            schedule,
            iteration=5 * epoch + batch + 1,
            batch=batch,
            is_last=batch == 4,
            is_manual=is_manual,
        )
    ]
    assert ends == boundaries


@pytest.mark.shows("L15")
@pytest.mark.parametrize(
    ("unit", "total", "steps", "epochs", "is_over"),
    [
        (EPOCH, 0, 0, 0, True),
        (EPOCH, 2, 99, 2, True),
        (ITERATION, 5, 4, 99, False),
        (ITERATION, 5, 5, 0, True),
        (EPOCH, math.inf, 10**9, 10**9, False),
    ],
)
def test_the_total_counts_complete_epochs_or_steps(
    unit: TrainingUnit, total: float, steps: int, epochs: int, is_over: bool
) -> None:
    """Total_steps=0 is legal, and the epoch under way is not complete."""
    state = TrainingState(current_iteration=steps, global_epoch=epochs + 1)
    schedule = Schedule(unit=unit, total_steps=total)
    assert is_total_reached(schedule, state, Cursor(epoch=epochs)) is is_over


@pytest.mark.shows("S53")
def test_a_limit_is_told_from_a_request_by_its_reason() -> None:
    schedule = Schedule(ITERATION, total_steps=3, early_stop_cycles=2)
    state = TrainingState(current_iteration=2, validation_cycles=2, early_stop_count=1)
    assert find_limit(schedule, state, Cursor()) == ""
    state.current_iteration = 3
    assert find_limit(schedule, state, Cursor()) == "total_steps reached"
    state.early_stop_count = 2
    assert find_limit(schedule, state, Cursor()) == "no improvement in 2 validations"
    assert is_limit("total_steps reached")
    assert is_limit("no improvement in 2 validations")
    assert not is_limit("request_stop was called")

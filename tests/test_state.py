"""The counters: what moves them, and what they start with."""

from __future__ import annotations

import pytest

from helios.state import Phase, TrainingState, TrainingUnit

HISTORICAL_FIELDS = {
    "current_iteration": 0,
    "global_iteration": 0,
    "global_epoch": 0,
    "validation_cycles": 0,
    "dataset_iter": 0,
    "early_stop_count": 0,
    "average_iter_time": 0.0,
    "running_iter": 0,
}


def test_phases_are_told_apart_by_their_words() -> None:
    """The words are part of keys of random numbers: renaming one changes the bits of a run."""
    words = [phase.value for phase in Phase]
    assert words == ["training", "validation", "testing", "prediction"]


def test_every_counter_starts_at_zero() -> None:
    assert TrainingState().dict() == {
        **HISTORICAL_FIELDS,
        "is_step_boundary": False,
        "is_step_committed": True,
        "global_step": 0,
    }


@pytest.mark.parametrize("unit", list(TrainingUnit))
def test_a_unit_is_found_by_its_name_in_lower_case(unit: TrainingUnit) -> None:
    assert TrainingUnit.from_str(unit.name.lower()) is unit

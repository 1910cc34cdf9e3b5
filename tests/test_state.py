"""Units and phases by their words."""

from __future__ import annotations

import pytest

from helios.state import Phase, TrainingUnit


def test_phases_are_told_apart_by_their_words() -> None:
    """The words are part of keys of random numbers: renaming one changes the bits of a run."""
    words = [phase.value for phase in Phase]
    assert words == ["training", "validation", "testing", "prediction"]


@pytest.mark.parametrize("unit", list(TrainingUnit))
def test_a_unit_is_found_by_its_name_in_lower_case(unit: TrainingUnit) -> None:
    assert TrainingUnit.from_str(unit.name.lower()) is unit

"""The counters: what moves them, and what they start with."""

from __future__ import annotations

import pytest

from helios.errors import ArgumentError
from helios.state import Cursor, Phase, TrainingState, TrainingUnit

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


def test_units_keep_their_historical_values() -> None:
    assert {unit.name: unit.value for unit in TrainingUnit} == {"ITERATION": 0, "EPOCH": 1}


@pytest.mark.parametrize("unit", list(TrainingUnit))
def test_a_unit_is_found_by_its_name_in_lower_case(unit: TrainingUnit) -> None:
    assert TrainingUnit.from_str(unit.name.lower()) is unit


@pytest.mark.parametrize("label", ["", "epochs", "EPOCH", "step", None, 1])
def test_an_unknown_unit_is_an_error_that_shows_it(label: object) -> None:
    """A ValueError."""
    with pytest.raises(ArgumentError, match='must be "iteration" or "epoch", got') as caught:
        TrainingUnit.from_str(label)  # type: ignore[arg-type]
    assert repr(label) in str(caught.value)


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


def test_a_state_of_helios_1_is_taken_as_it_is() -> None:
    """Old checkpoints hold these fields and no others."""
    assert TrainingState(**HISTORICAL_FIELDS) == TrainingState()


def test_the_dictionary_of_a_state_is_a_copy_that_builds_an_equal_one() -> None:
    state = TrainingState(global_iteration=3, average_iter_time=0.25, is_step_boundary=True)
    table = state.dict()
    assert TrainingState(**table) == state
    table["global_iteration"] = 9
    assert state.global_iteration == 3


@pytest.mark.shows("C13")
def test_epochs_are_numbered_from_one_and_begin_without_a_batch() -> None:
    """C13."""
    state = TrainingState(dataset_iter=7)
    state.begin_epoch(0)
    assert (state.global_epoch, state.dataset_iter) == (1, 0)
    state.begin_epoch(4)
    assert state.global_epoch == 5


def test_in_epoch_unit_every_batch_is_a_current_iteration() -> None:
    """H37: accumulation has no effect on the counts."""
    state = TrainingState()
    for is_boundary in (False, True, False, False, True):
        state.begin_iteration(TrainingUnit.EPOCH, is_boundary=is_boundary)
        assert state.current_iteration == state.global_iteration
        assert state.is_step_boundary is is_boundary
    assert state.global_iteration == 5


def test_in_iteration_unit_only_a_boundary_moves_the_current_iteration() -> None:
    """H38."""
    state, seen = TrainingState(), []
    for is_boundary in (False, False, True, False, False, True):
        state.begin_iteration(TrainingUnit.ITERATION, is_boundary=is_boundary)
        seen.append((state.global_iteration, state.current_iteration, state.is_step_boundary))
    assert seen == [
        (1, 0, False),
        (2, 0, False),
        (3, 1, True),
        (4, 1, False),
        (5, 1, False),
        (6, 2, True),
    ]


def test_the_end_of_an_epoch_clears_its_batches_and_nothing_else() -> None:
    state = TrainingState(global_iteration=8, global_epoch=2, dataset_iter=4, running_iter=8)
    state.end_epoch()
    assert state == TrainingState(
        global_iteration=8, global_epoch=2, dataset_iter=0, running_iter=8
    )


@pytest.mark.shows("H41")
def test_a_validation_is_counted_and_begins_the_running_iterations_anew() -> None:
    """H41."""
    state = TrainingState(running_iter=6, early_stop_count=2)
    state.end_validation()
    assert (state.validation_cycles, state.running_iter, state.early_stop_count) == (1, 0, 2)


@pytest.mark.shows("H30")
def test_an_improvement_resets_the_early_stop_count_and_its_absence_adds_one() -> None:
    """H30."""
    state, seen = TrainingState(), []
    for has_improved in (False, False, True, False):
        state.record_improvement(has_improved=has_improved)
        seen.append(state.early_stop_count)
    assert seen == [1, 2, 0, 1]


def test_the_next_epoch_begins_at_its_first_sample() -> None:
    """H12: what was skipped in one epoch is not skipped in the next."""
    cursor = Cursor(epoch=2, batch=3, sample=10)
    cursor.next_epoch()
    assert cursor == Cursor(epoch=3)


def test_an_epoch_that_is_begun_anew_keeps_its_number_and_a_note_of_the_end() -> None:
    """After an allowed change of the data."""
    cursor = Cursor(epoch=2, batch=3, sample=10, stop_reason="asked")
    cursor.restart_epoch()
    assert cursor == Cursor(epoch=2, stop_reason="asked")


def test_a_note_of_the_end_can_be_withdrawn() -> None:
    """A finished run goes on when total_steps was raised."""
    cursor = Cursor()
    assert cursor.stop_reason == ""
    cursor.stop("no improvement")
    assert cursor.stop_reason == "no improvement"
    cursor.go_on()
    assert cursor == Cursor()


def test_the_dictionary_of_a_cursor_builds_an_equal_one() -> None:
    cursor = Cursor(epoch=1, batch=2, sample=8, stop_reason="asked")
    assert Cursor(**cursor.dict()) == cursor

"""Faults in searches for a learning rate, in the horizon, and in weights from other files."""

from __future__ import annotations

from contextlib import contextmanager

from tests.planted.planting import fault

FIND = "tests/test_find_lr.py"
FROZEN = "tests/checkpoint/test_frozen.py"


@fault("helios.find_lr:_without_trace", f"{FIND}::test_a_run_after_a_search_has_the_same_files")
@contextmanager
def a_search_leaves_its_model_behind(without_trace, model, datamodule, others):
    yield


@fault(
    "helios.data.source:_count_windows",
    "tests/start/test_horizon.py::test_a_run_makes_the_steps_that_setup_was_told",
)
def the_last_window_of_an_epoch_is_not_counted(count, schedule, length, *, is_manual):
    return length // (1 if is_manual else schedule.accumulation_steps)


@fault(
    "helios.checkpoint.frozen:digest_of",
    f"{FROZEN}::test_a_setup_that_makes_something_else_is_refused_by_name",
)
def another_base_counts_as_the_same(digest_of, tensor):
    return "sha256:0"


@fault(
    "helios.checkpoint.export:_leave_out_frozen",
    f"{FROZEN}::test_an_export_of_what_is_trained_has_no_frozen_parameters",
)
def frozen_parameters_are_exported_too(leave_out, state):
    return state

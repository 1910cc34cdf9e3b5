"""Faults in the numbers that surround a training: scores, times, memory, reports."""

from __future__ import annotations

from tests.planted.planting import fault

TOTALS = "tests/loops/test_totals.py"


@fault(
    "helios.loops.evaluation:as_summand",
    f"{TOTALS}::test_scores_of_a_coarse_type_are_added_in_float64",
)
def scores_are_added_in_the_type_of_the_model(as_summand, value):
    return value


@fault("helios.model.model:as_summand", f"{TOTALS}::test_running_losses_are_added_in_float64")
def running_losses_are_added_in_the_type_of_the_model(as_summand, value):
    return value


@fault(
    "helios.loops.evaluation:Totals.add",
    f"{TOTALS}::test_scores_of_a_processor_count_each_sample_once",
)
def each_batch_of_a_processor_weighs_the_same(add, totals, result, suffix="", *, size=None):
    add(totals, result, suffix)


@fault(
    "helios.startup.checkpoint_search.run_rules:adopt_rules",
    "tests/startup/test_run_rules.py",
)
def what_is_new_is_not_said(adopt_rules, options):
    return adopt_rules(None)

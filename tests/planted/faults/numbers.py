"""Faults in the numbers that surround a training: scores, times, memory, reports."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.planted.planting import fault

TOTALS = "tests/loops/test_totals.py"


@fault(
    "helios.loops.evaluation:as_summand",
    f"{TOTALS}::test_scores_of_a_coarse_type_are_added_in_float64",
)
def scores_are_added_in_the_type_of_the_model(as_summand, value):
    return value


@fault(
    "helios.core.loss_means:RunningSums.add",
    f"{TOTALS}::test_running_losses_are_added_in_float64",
)
def running_losses_are_added_in_the_type_of_the_model(add, sums, losses):
    table = sums.table()
    for name, loss in losses.items():
        table[name] = table[name] + loss.detach() if name in table else loss.detach()


MEANS = "tests/integration/test_mean_losses.py"


@fault(
    "helios.core.loss_means:LossMeans.iteration_ended",
    f"{MEANS}::test_what_is_logged_are_means_since_the_last_point",
)
def what_is_logged_is_the_loss_of_the_last_iteration(iteration_ended, means, iteration):
    from helios.core.loss_means import Viewer

    for viewer in Viewer:
        means.pop_means(viewer)
    iteration_ended(means, iteration)


@fault(
    "helios.loops.evaluation:Totals.add",
    f"{TOTALS}::test_scores_of_a_processor_count_each_sample_once",
)
def each_batch_of_a_processor_weighs_the_same(add, totals, result, suffix="", *, size=None):
    add(totals, result, suffix)


@fault(
    "helios.hooks.context:Context.padding",
    "tests/plugins/test_metrics_replicas.py::test_padding_of_an_epoch_does_not_count",
)
def training_metrics_count_the_padding_of_an_epoch(padding, context):
    return 0, 0


@fault(
    "helios.reports.charts:thin",
    "tests/reports/test_run_report.py::test_peaks_stay_in_a_long_run",
)
def a_chart_loses_the_peaks_between_its_points(thin, curve):
    return tuple(np.asarray(each)[:: 1 + len(each) // 1_000] for each in curve)


@fault("helios.reports.run_comparison:_group", "tests/reports/test_run_comparison.py")
def a_comparison_has_the_mean_of_runs_that_differ(group, rows, rule):
    return group([dataclasses.replace(row, settings={"seed": row.run}) for row in rows], rule)

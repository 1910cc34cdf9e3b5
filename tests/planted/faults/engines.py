"""Faults in what an engine does, what users override, and what plugins do beside it."""

from __future__ import annotations

from tests.planted.planting import fault


@fault(
    "helios.engines.engine:Engine.optimizer_step",
    "tests/engines/test_scaler.py::test_a_step_that_was_left_out_moves_neither_scheduler_nor_count",
)
def a_step_that_fp16_leaves_out_moves_the_scheduler(optimizer_step, engine, optimizer):
    optimizer_step(engine, optimizer)
    return True


@fault(
    "helios.engines.engine:Engine.load_state_dict",
    "tests/engines/test_engine.py::test_an_open_window_is_part_of_the_state",
)
def an_open_window_is_not_counted_on(load_state_dict, engine, state_dict):
    load_state_dict(engine, {**state_dict, "open_micro_batches": 0})


@fault(
    "helios.engines.data_parallel:wrap",
    "tests/engines/test_data_parallel.py::test_buckets_are_added_along_the_tree",
)
def a_module_is_wrapped_by_stock_data_parallelism(wrap, module, device, replicas, **more):
    from torch.nn.parallel import DistributedDataParallel

    wrapped = wrap(module, device, replicas, **more)
    return DistributedDataParallel(module) if wrapped is not module else module


@fault(
    "helios.state:TrainingState.withdraw_step",
    "tests/loops/test_loop.py::test_an_update_that_a_hook_leaves_out_is_withdrawn",
)
def a_step_that_was_left_out_counts(withdraw_step, state, unit):
    state.is_step_committed = False


@fault(
    "helios.plugins.averaging:WeightAverage.load_state_dict",
    "tests/plugins/test_averaging.py::test_a_run_with_an_average_resumes_everywhere",
)
def an_average_begins_anew_at_a_resume(load_state_dict, plugin, state_dict):
    load_state_dict(plugin, {**state_dict, "num_updates": 0})


LOSSES = "tests/loops/test_own_losses.py"


@fault(
    "helios.loops.optimizer:OptimizerLoop._end_step",
    f"{LOSSES}::test_losses_that_are_passed_on_train_as_the_default_ones",
)
def a_loop_of_the_users_updates_once_for_each_replica(end_step, loop, num_shared, watch):
    runner = loop._runner
    is_last, runner.is_last = runner.is_last, loop._has_own_losses or runner.is_last
    try:
        end_step(loop, num_shared, watch)
    finally:
        runner.is_last = is_last

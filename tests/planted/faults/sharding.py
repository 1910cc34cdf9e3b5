"""Faults in models that no process holds whole."""

from __future__ import annotations

from tests.planted.planting import fault

TRAINING = "tests/sharding/test_sharded_training.py"
SAME_BITS = f"{TRAINING}::test_sharded_networks_have_the_bits_of_whole_ones"
RECOMPUTED = "tests/sharding/test_recomputation.py"
KEYED = "tests/init/test_keyed_init.py"
SUMS = "tests/sharding/test_unit_sum.py"
CALLS = "tests/sharding/test_unit_calls.py"
STEPS = "tests/sharding/test_steps_of_users.py"
CLIPPED = f"{TRAINING}::test_accumulated_and_clipped_the_bits_are_those_of_one_process"


@fault(
    "helios.core.sharded_tensors:RowShare.rows",
    "tests/sharding/test_sharded_training.py::test_a_killed_run_goes_on_in_other_processes",
)
def a_process_reads_the_rows_of_its_neighbour(rows, share, count):
    return rows(share._replace(rank=(share.rank + 1) % share.num_processes), count)


@fault("helios.sharding.sharded_gradients:_halve", SAME_BITS)
def shards_are_added_in_the_order_of_ranks(halve, chunks, group):
    import torch
    import torch.distributed as dist

    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks.contiguous(), group=group)
    return received.flip(0).cumsum(0)[-1].reshape(-1)


@fault(
    "helios.sharding.recomputation:_set_attributes",
    "tests/sharding/test_recomputation.py::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
)
def a_forward_that_is_computed_again_updates_batchnorm_twice(set_attributes, parts, values):
    return None


@fault(
    "helios.sharding.recomputation:_set_states",
    "tests/sharding/test_recomputation.py::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
)
def a_forward_that_is_computed_again_draws_other_numbers(set_states, generators, states):
    return None


@fault(
    "helios.sharding.recomputation:_Start._require_unchanged",
    "tests/sharding/test_recomputation.py::test_parameters_that_are_changed_before_backward_are_an_error",
)
def a_forward_is_computed_again_with_weights_that_have_changed(require_unchanged, start):
    return None


@fault(
    "helios.init.keyed_init:KeyedInit._call_initializer",
    "tests/init/test_keyed_init.py::test_a_module_gets_what_its_initializer_draws_under_the_key_of_its_path",
)
def the_name_of_a_module_is_missing_in_its_key(call_initializer, init, module):
    paths = init._paths
    init._paths = dict.fromkeys(paths, "net")
    try:
        call_initializer(init, module)
    finally:
        init._paths = paths


@fault(
    "helios.init.keyed_init:KeyedInit._check_origin",
    "tests/init/test_keyed_init.py::test_what_setup_would_lose_is_refused_by_name",
)
def what_setup_writes_outside_of_initializers_is_lost(check_origin, init, *args):
    return None


@fault(
    "helios.sharding.unit_calls:UnitCalls._compare_one",
    "tests/sharding/test_unit_calls.py::test_other_units_are_named_before_they_are_gathered",
)
def processes_may_gather_different_units(compare_one, calls, *args):
    return None


@fault(
    "helios.migration.helios_ml:_take_state",
    "tests/migration/test_migrations.py::test_every_release_goes_on_at_the_batch_that_its_counters_mean",
)
def a_migrated_run_begins_its_epoch_anew(take_state, old):
    import dataclasses

    return dataclasses.replace(take_state(old), dataset_iter=0)


@fault(
    "helios.migration.helios_ml:_take_randomness",
    "tests/migration/test_migrations.py::test_numbers_of_numpy_in_the_generators_state_become_plain",
)
def a_migrated_run_forgets_its_generators(take_randomness, old):
    return take_randomness(None)


@fault(
    "helios.sharding.recomputation:_choose",
    f"{RECOMPUTED}::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
)
def a_forward_that_is_computed_again_appends_to_lists_of_its_caller(choose, value, other):
    return value


@fault(
    "helios.sharding.recomputation:_counter_of",
    f"{RECOMPUTED}::test_a_unit_keeps_its_inputs_and_no_activations",
)
def units_inside_of_another_one_keep_their_inputs(counter_of, tensor):
    return tensor


@fault(
    "helios.sharding.recomputation:_Forward.__call__",
    f"{RECOMPUTED}::test_a_unit_keeps_its_inputs_and_no_activations",
)
def activations_of_units_are_kept(call, forward, *args, **kwargs):
    return forward._forward(*args, **kwargs)


@fault(
    "helios.init.keyed_init:KeyedInit._is_unwritten",
    f"{KEYED}::test_a_network_without_all_values_is_refused_by_name",
)
def values_that_an_initializer_leaves_unwritten_are_not_found(is_unwritten, init, tensor, place):
    return False


@fault(
    "helios.sharding.sharded_gradients:UnitSum._has_whole_leaf",
    f"{SUMS}::test_zeros_of_calls_without_a_gradient_are_not_added",
)
def zeros_of_a_module_that_runs_twice_are_added(has_whole_leaf, unit_sum, chunks):
    unit_sum._has_new = True
    return has_whole_leaf(unit_sum, chunks)


@fault("helios.sharding.sharded_gradients:UnitSum._has_whole_leaf", SAME_BITS)
def a_module_that_runs_twice_is_added_after_its_first_backward(has_whole_leaf, unit_sum, chunks):
    has_whole_leaf(unit_sum, chunks)
    return True


@fault(
    "helios.sharding.sharded_gradients:UnitSum._add",
    f"{SUMS}::test_a_second_backward_of_a_turn_is_an_error",
)
def gradients_of_a_second_backward_replace_those_of_the_first(add, unit_sum, *args):
    unit_sum._has_added = False
    add(unit_sum, *args)


@fault(
    "helios.sharding.sharded_gradients:UnitSum.count_forward",
    f"{SUMS}::test_forward_passes_that_are_computed_again_are_not_counted",
)
def a_forward_that_is_computed_again_counts_as_a_call(count_forward, unit_sum, *args):
    import torch

    unit_sum._num_forwards += torch.is_grad_enabled()


@fault(
    "helios.sharding.sharded_gradients:UnitSum.add_late",
    f"{STEPS}::test_calls_of_networks_have_equal_bits[call_twice]",
)
def gradients_without_a_last_backward_are_dropped(add_late, unit_sum):
    return None


@fault(
    "helios.sharding.fsdp_adapter:ShardedUnit.watch_values",
    f"{STEPS}::test_what_shards_would_lose_is_refused",
)
def what_a_forward_writes_to_sharded_parameters_is_lost(watch_values, unit, refuse):
    return None


@fault(
    "helios.sharding.requirements:check_hooks", f"{STEPS}::test_what_shards_would_lose_is_refused"
)
def hooks_that_sharded_parameters_get_in_training_are_not_called(check_hooks, parameters):
    return None


@fault(
    "helios.sharding.fsdp_adapter:_without_base", f"{STEPS}::test_calls_of_networks_have_equal_bits"
)
def a_unit_returns_a_view_whose_hook_may_be_lost(without_base, tensor):
    return tensor


@fault(
    "helios.sharding.sharded_gradients:ShardedGradients._record_gradient",
    "tests/sharding/test_sharded_gradients.py::test_gradients_of_a_repeated_step_do_not_count",
)
def what_a_process_without_a_replica_computes_counts(
    record_gradient, gradients, unit_sum, name, gradient
):
    record_gradient(gradients, unit_sum, name, gradient)
    gradients._present.add(name)


@fault("helios.sharding.sharded_gradients:ShardedGradients._find_present", SAME_BITS)
def sharded_parameters_that_no_replica_uses_have_gradients(find_present, gradients, names):
    return list(names)


@fault(
    "helios.sharding.unit_calls:UnitCalls.compare",
    f"{CALLS}::test_later_ones_are_named_before_the_update",
)
def later_calls_of_different_units_are_not_compared(compare, calls):
    calls._calls = type(calls._calls)("L")
    calls._results, calls._is_forward = [], False


@fault(
    "helios.sharding.unit_calls:UnitCalls.compare_forward",
    f"{CALLS}::test_a_loss_that_uses_no_unit_is_named_while_others_are_in_backward",
)
def a_turn_without_a_backward_is_not_compared(compare_forward, calls):
    return None


@fault("helios.replicas.gradients:norm_by_rows", CLIPPED)
def the_norm_of_sharded_gradients_is_that_of_one_shard(norm_by_rows, gradients, *args, **more):
    import torch

    norms = [getattr(gradient, "_local_tensor", gradient).norm() for gradient in gradients]
    return torch.stack(norms).norm()


@fault(
    "helios.replicas.named_sums:NumberReducer._cut",
    "tests/sharding/test_waves.py::test_rows_of_waves_are_put_in_the_order_of_replicas",
)
def losses_of_waves_are_summed_in_the_order_of_processes(cut, reducer, parts):
    reducer._is_in_order = True
    return cut(reducer, parts)


@fault(
    "helios.sharding.unit_calls:UnitCalls._record_results",
    f"{CALLS}::test_results_that_not_all_use_are_named_before_units_are_gathered_in_backward",
)
def processes_that_use_different_results_are_not_compared(record_results, calls):
    return None


@fault(
    "helios.sharding.unit_calls:UnitCalls.compare",
    f"{CALLS}::test_one_that_calls_a_network_again_while_the_other_is_in_backward_is_named",
)
def a_comparison_of_all_calls_meets_that_of_one_call(compare, calls):
    number, calls._num_single = calls._num_single, 1 << 30
    compare(calls)
    calls._num_single = number


@fault("helios.replicas.gradients:GradientSum.add_micro_batch", CLIPPED)
def one_process_adds_the_micro_batches_of_each_replica_first(
    collect, gradient_sum, replica, *, ends_window
):
    class Whole:
        is_sharded = False

    found, gradient_sum._replicas = gradient_sum._replicas, Whole
    try:
        collect(gradient_sum, replica, ends_window=ends_window)
    finally:
        gradient_sum._replicas = found


@fault(
    "helios.core.sharded_tensors:_Deferred.__torch_function__",
    "tests/sharding/test_unread_tensors.py"
    "::test_tensors_that_are_not_read_are_refused_by_name_where_values_are_needed",
)
def what_is_computed_with_a_tensor_that_is_not_read_is_lost(
    torch_function, cls, func, types, args=(), kwargs=None
):
    import torch

    if func.__name__ in ("__deepcopy__", "__repr__"):
        return torch_function(cls, func, types, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


@fault(
    "helios.sharding.networks:_cut_state",
    "tests/sharding/test_keyed_training.py::test_no_process_holds_more_than_its_shards_and_a_unit",
)
def a_sharded_network_is_loaded_as_a_whole(cut_state, module, state, prefix, *more):
    for place, part in module.named_modules(prefix=prefix.removesuffix(".")):
        cut_state(part, state, f"{place}." if place else "", *more)


@fault(
    "helios.state_graph.rollback:_is_of_user",
    f"{RECOMPUTED}::test_what_objects_hold_is_counted_once_and_they_stay_the_same_objects",
)
def what_a_second_forward_changes_in_objects_counts_again(is_of_user, kind):
    return False

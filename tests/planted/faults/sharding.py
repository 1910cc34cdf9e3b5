"""Faults in models that no process holds whole."""

from __future__ import annotations

from tests.planted.planting import fault

TRAINING = "tests/sharding/test_sharded_training.py"
SAME_BITS = f"{TRAINING}::test_sharded_networks_have_the_bits_of_whole_ones"
RECOMPUTED = "tests/sharding/test_recomputation.py"
CLIPPED = f"{TRAINING}::test_a_killed_run_goes_on_in_other_processes"


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
    "helios.sharding.recomputation:_Start._back_up",
    "tests/sharding/test_recomputation.py::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
)
def a_forward_that_is_computed_again_updates_batchnorm_twice(back_up, start, *others):
    from helios.backup import Backup

    return Backup(())


@fault(
    "helios.start.keyed_init:KeyedInit._run",
    "tests/start/test_keyed_init.py::test_a_module_gets_what_its_initializer_draws_under_the_key_of_its_path",
)
def the_name_of_a_module_is_missing_in_its_key(run, init, module, watch):
    paths = init._paths
    init._paths = dict.fromkeys(paths, "net")
    try:
        return run(init, module, watch)
    finally:
        init._paths = paths


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
    "helios.sharding.recomputation:_Forward.__call__",
    f"{RECOMPUTED}::test_a_unit_keeps_its_inputs_and_no_activations",
)
def activations_of_units_are_kept(call, forward, *args, **kwargs):
    return forward._forward(*args, **kwargs)


@fault("helios.sharding.sharded_gradients:ShardedGradients._find_present", SAME_BITS)
def sharded_parameters_that_no_replica_uses_have_gradients(find_present, gradients, names):
    return list(names)


@fault("helios.replicas.gradients:norm_by_rows", CLIPPED)
def the_norm_of_sharded_gradients_is_that_of_one_shard(norm_by_rows, gradients, *args, **more):
    import torch

    from helios.core.sharded_tensors import local_of

    norms = [local_of(gradient).norm() for gradient in gradients]
    return torch.stack(norms).norm()


@fault(
    "helios.replicas.named_sums:NumberReducer._cut",
    "tests/sharding/test_waves.py::test_rows_of_waves_are_put_in_the_order_of_replicas",
)
def losses_of_waves_are_summed_in_the_order_of_processes(cut, reducer, parts):
    reducer._is_in_order = True
    return cut(reducer, parts)


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

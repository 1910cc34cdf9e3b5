"""Faults in models that no process holds whole, and in files of earlier versions."""

from __future__ import annotations

from tests.planted.planting import fault

TRAINING = "tests/sharding/test_sharded_training.py"
SAME_BITS = f"{TRAINING}::test_sharded_networks_have_the_bits_of_whole_ones"
RECOMPUTED = "tests/sharding/test_recomputation.py"
KEYED = "tests/sharding/test_keyed_init.py"
MIGRATION = "tests/migration/test_migrations.py"


@fault(
    "helios.core.sharded_tensors:RowShare.rows",
    "tests/sharding/test_sharded_training.py::test_a_killed_run_goes_on_in_other_processes",
)
def a_process_reads_the_rows_of_its_neighbour(rows, share, count):
    return rows(share._replace(rank=(share.rank + 1) % share.num_processes), count)


@fault("helios.sharding.unit_sum:_halve", SAME_BITS)
def shards_are_added_in_the_order_of_ranks(halve, chunks, group):
    import torch
    import torch.distributed as dist

    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks.contiguous(), group=group)
    return received.flip(0).cumsum(0)[-1].reshape(-1)


@fault(
    "helios.sharding.recomputation:_Start._write",
    "tests/sharding/test_recomputation.py::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
)
def a_forward_that_is_computed_again_updates_batchnorm_twice(write, start, values):
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
    "helios.sharding.keyed_init:KeyedInit._call_initializer",
    "tests/sharding/test_keyed_init.py::test_a_module_gets_what_its_initializer_draws_under_the_key_of_its_path",
)
def the_name_of_a_module_is_missing_in_its_key(call_initializer, init, module):
    paths = init._paths
    init._paths = dict.fromkeys(paths, "net")
    try:
        call_initializer(init, module)
    finally:
        init._paths = paths


@fault(
    "helios.sharding.keyed_init:KeyedInit._check_origin",
    "tests/sharding/test_keyed_init.py::test_what_setup_would_lose_is_refused_by_name",
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
    "helios.migration.schema_step:_take_state",
    "tests/migration/test_migrations.py::test_every_release_goes_on_at_the_batch_that_its_counters_mean",
)
def a_migrated_run_begins_its_epoch_anew(take_state, old):
    import dataclasses

    return dataclasses.replace(take_state(old), dataset_iter=0)


@fault(
    "helios.migration.schema_step:_take_randomness",
    "tests/migration/test_migrations.py::test_numbers_of_numpy_in_the_generators_state_become_plain",
)
def a_migrated_run_forgets_its_generators(take_randomness, old):
    return take_randomness(None)


@fault("helios.migration.folder_migration:_back_up", "tests/migration/test_migration_kills.py")
def the_old_file_of_a_migration_is_not_kept(back_up, path, source):
    return None

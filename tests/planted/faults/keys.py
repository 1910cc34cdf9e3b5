"""Faults in what is drawn: every batch and every iteration has its own key."""

from __future__ import annotations

import contextlib
import dataclasses
import random

from tests.planted.planting import fault

RNG = "tests/core/test_rng.py"
WORKERS = "tests/integration/test_resume.py::test_workers_change_no_bit[from 0 to 2 workers]"
ELASTIC = "tests/distributed/test_elastic.py::test_any_number_of_processes_gives_the_same_bits"
NUMPY = "tests/integration/test_numpy_global.py"
FROZEN = "tests/integration/test_frozen_runs.py::test_a_frozen_script_gives_its_bits"


@fault("helios.core.rng:key", RNG)
def a_seed_is_added_in_place_of_hashed(key, *fields):
    numbers = [field for field in fields if type(field) is int]
    return key(*(field for field in fields if type(field) is not int), sum(numbers))


@fault("helios.core.rng:KeySeries.at", RNG)
def a_series_of_keys_shifts_behind_its_first_block(at, series, counter):
    return at(series, counter + counter // 64)


@fault("helios.core.rng:reseed", RNG)
def the_random_module_is_not_seeded(reseed, seed):
    found = random.getstate()
    reseed(seed)
    random.setstate(found)


@fault("helios.core.rng:DefaultNumpyRNG._settle", RNG)
def half_a_number_of_numpy_outlives_its_key(settle, generator):
    bits = generator._generator.bit_generator
    before = bits.state
    settle(generator)
    bits.state = {**bits.state, **{k: before[k] for k in ("has_uint32", "uinteger")}}


@fault("helios.core.rng:stream", RNG)
def a_validation_does_not_restore_the_generators(stream, seed):
    from helios.core import rng

    rng.reseed(seed)
    return contextlib.nullcontext()


@fault("helios.data.loader:KeyedDataset.__getitems__", WORKERS)
def workers_do_not_seed_before_a_fetch(getitems, dataset, indices):
    return getitems(dataset, getattr(indices, "indices", indices))


@fault("helios.replicas.replica_runner:ReplicaRunner.begin_iteration", WORKERS)
def nothing_is_seeded_before_an_iteration(begin_iteration, runner, iteration):
    runner._before.at(iteration)


@fault("helios.data.order:Position.fetch_keys", f"{FROZEN}[today/one_replica]")
def the_purpose_is_missing_in_the_key_of_a_fetch(fetch_keys, position):
    return fetch_keys(dataclasses.replace(position, purpose=""))


@fault(
    "helios.data.order:Position.fetch_keys",
    "tests/data/test_keyed.py::test_what_is_drawn_follows_from_epoch_batch_and_replica",
)
def the_replica_is_missing_in_the_key_of_a_fetch(fetch_keys, position):
    return fetch_keys(dataclasses.replace(position, replica=0))


@fault(
    "helios.data.order:Position.fetch_keys",
    "tests/data/test_keyed.py::test_the_key_depends_on_everything_that_names_a_batch",
)
def the_epoch_is_missing_in_the_key_of_a_fetch(fetch_keys, position):
    return fetch_keys(dataclasses.replace(position, epoch=0))


@fault(
    "helios.data.order:Position.order_key",
    "tests/data/test_order.py::test_the_batch_sampler_of_pytorch_shuffles_anew_in_each_epoch",
)
def the_epoch_is_missing_in_the_key_of_a_sampler_of_the_user(order_key, position):
    return order_key(dataclasses.replace(position, epoch=0))


@fault("helios.replicas.replica_runner:SharedReplicaRunner.begin", f"{ELASTIC}[4-2-2]")
def all_replicas_of_a_process_draw_the_same_numbers(begin, runner, replica, *, opens_window):
    from helios.core import rng

    begin(runner, replica, opens_window=opens_window)
    rng.reseed(runner._own[runner._first].at(runner._number))


@fault("helios.replicas.replica_runner:SharedReplicaRunner._end_last", f"{ELASTIC}[4-3-1]")
def hooks_draw_on_the_numbers_of_the_last_replica(end_last, runner, table, **more):
    from helios.core import rng

    found = rng.get_rng_state_dict()
    end_last(runner, table, **more)
    rng.load_rng_state_dict(found)


@fault("helios.core.rng:KeySeries.at", f"{FROZEN}[today/one_replica]")
def random_numbers_are_others_than_those_of_frozen_runs(at, series, counter):
    return at(series, counter) ^ 1


@fault(
    "helios.core.rng:load_states",
    f"{NUMPY}::test_validations_have_no_influence_on_what_training_draws",
)
def the_global_generator_of_numpy_is_not_put_back(load_states, state_dict):
    from helios.core import rng

    rng.load_rng_state_dict(state_dict)


@fault(
    "helios.core.rng:numpy_global_kept",
    f"{NUMPY}::test_it_is_the_same_before_and_after_a_call[fit]",
)
def the_script_goes_on_with_the_numbers_of_the_last_key(numpy_global_kept):
    return contextlib.nullcontext()

"""Faults in which samples come next, and who gets them."""

from __future__ import annotations

from tests.planted.planting import fault

RESUMED = "tests/integration/test_resume.py::test_a_run_by_steps_resumes_everywhere[plain]"


@fault("helios.loops.epoch:EpochLoop._end_iteration", RESUMED)
def the_cursor_is_one_batch_ahead(end_iteration, loop, batches):
    end_iteration(loop, batches)
    loop._run.cursor.batch += 1


@fault("helios.state:Cursor.restart_epoch", RESUMED)
def an_epoch_begins_at_the_sample_where_the_last_one_has_ended(restart_epoch, cursor):
    sample = cursor.sample
    restart_epoch(cursor)
    cursor.sample = sample


@fault(
    "helios.data.samplers:ResumableSampler.set_epoch",
    "tests/data/test_samplers.py::test_the_random_order_depends_on_seeds_and_epoch_only",
)
def the_epoch_is_missing_in_the_key_of_the_order(set_epoch, sampler, epoch):
    set_epoch(sampler, 0)


@fault(
    "helios.data.permutation:_Network._walk",
    "tests/data/test_permutation.py::test_network_is_a_bijection_for_every_length_to_2000",
)
def positions_beyond_the_end_are_not_enciphered_again(walk, network, values, rounds):
    from helios.data import permutation

    found = permutation._cross(values.astype("uint64"), network._parts, rounds)
    return (found % network._parts[0]).astype("int64")


@fault(
    "helios.data.permutation:Permutation.blocks",
    "tests/data/test_permutation.py::test_indices_from_any_start_are_the_tail_of_the_whole_order",
)
def an_order_that_begins_in_mid_epoch_is_one_sample_late(blocks, permutation, start=0):
    return blocks(permutation, min(start + bool(start), permutation._length))


@fault(
    "helios.data.sharding_plan:ShardingPlan._hand_out",
    "tests/data/test_sharding_plan.py::test_replicas_get_what_pytorch_deals_out_on_any_number_of_processes",
)
def replicas_get_neighbouring_samples(hand_out, plan, window, replicas):
    if plan._is_single or plan._is_listed:
        return hand_out(plan, window, replicas)
    size = -(-len(window) // plan._stride)
    hands = [window[size * (r % plan._stride) :][:size] for r in replicas]
    return [hand for hand in hands if hand]


@fault(
    "helios.data.sharding_plan:ShardingPlan._even_out",
    "tests/data/test_sharding_plan.py::test_an_evaluation_gives_each_sample_once",
)
def an_evaluation_counts_the_samples_that_pad_its_end(even_out, plan, window, head):
    surplus = len(window) % plan._stride
    return window + window[: plan._stride - surplus] if surplus else window


@fault(
    "helios.data.sharding_plan:_skip",
    "tests/data/test_skipped.py::test_all_others_stay_what_they_are",
)
def batches_after_a_skipped_one_get_the_keys_of_others(skip, turns, first, skipped):
    return (turn._replace(skipped=(0, 0)) for turn in skip(turns, first, skipped))


@fault(
    "helios.data.loader:ask_twice",
    "tests/data/test_indices.py::test_looking_aside_moves_no_generator_and_no_sampler",
)
def asking_for_indices_draws_from_the_generators_of_the_run(ask_twice, position, ask):
    from helios.core import rng

    rng.reseed(position.order_key())
    return ask()

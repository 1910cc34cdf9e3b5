"""Faults in what is summed over replicas, in which order, and by what it is divided."""

from __future__ import annotations

from tests.planted.planting import fault

ELASTIC = "tests/distributed/test_elastic.py::test_any_number_of_processes_gives_the_same_bits"
BUCKETS = "tests/distributed/test_buckets.py::test_buckets_change_no_bit"


@fault("helios.replicas.tree_reducer:TreeReducer._send_chunks", f"{ELASTIC}[3-3-1]")
def gradients_are_added_by_a_stock_all_reduce(send_chunks, reducer, own):
    import torch.distributed as dist

    for part in own[1:]:
        own[0].add_(part)
    dist.all_reduce(own[0])


@fault(
    "helios.replicas.tree_reducer:TreeReducer._halve_and_double",
    "tests/replicas/test_tree_reducer.py::test_sums_have_the_bits_of_the_definition_on_every_rank",
)
def the_farthest_process_is_added_first(halve_and_double, reducer, own, distances):
    halve_and_double(reducer, own, distances[::-1])


@fault(
    "helios.replicas.reduction_tree:children",
    "tests/replicas/test_reduction_tree.py::test_a_node_splits_after_the_first_half_rounded_up",
)
def a_node_splits_after_its_half_rounded_down(children, node):
    middle = node.start + len(node) // 2
    return range(node.start, middle), range(middle, node.stop)


@fault(
    "helios.replicas.flat_gradients:FlatGradients.add",
    "tests/replicas/test_gradients.py::test_the_sum_follows_the_tree",
)
def gradients_are_divided_before_they_are_added(add, gradients, left, right, **more):
    for flat in (*left.flats, *right.flats):
        flat.div_(3)
    total = add(gradients, left, right, **more)
    for flat in total.flats:
        flat.mul_(3)
    return total


@fault(
    "helios.replicas.gradients:divide",
    "tests/engines/test_engine.py::test_gradients_are_the_mean_over_the_batches_really_in_the_window",
)
def a_cut_window_is_divided_by_the_length_of_a_whole_one(divide, optimizer, count):
    divide(optimizer, max(count, 3))


@fault(
    "helios.replicas.flat_gradients:FlatGradients._missing_everywhere",
    "tests/replicas/test_gradients.py::test_a_gradient_of_one_process_is_there_on_all",
)
def a_gradient_that_a_replica_lacks_is_none(missing_everywhere, gradients, total):
    return total.missing


@fault(
    "helios.engines.engine:Engine.average_gradients",
    "tests/engines/test_engine.py::test_the_mean_is_clipped_and_not_the_sum",
)
def gradients_are_clipped_before_they_are_averaged(average_gradients, engine, optimizer):
    engine.clip_gradients(optimizer)
    average_gradients(engine, optimizer)
    engine._limits = {"clip_norm": None, "clip_value": None}


@fault("helios.replicas.module_buffers:ReplicaBuffers.commit", f"{ELASTIC}[4-2-2]")
def the_buffers_of_the_last_replica_are_kept(commit, buffers):
    buffers._own.clear()
    commit(buffers)


@fault(
    "helios.replicas.named_sums:_add_up",
    "tests/replicas/test_replicas.py::test_means_and_sums_follow_the_tree",
)
def losses_are_summed_one_after_another(add_up, tables):
    from helios.replicas import named_sums

    total = tables[0]
    for table in tables[1:]:
        total = named_sums._add_scores(total, table)
    return dict(sorted(total.items()))


@fault("helios.replicas.reduction_tree:TreeStack.preview", BUCKETS)
def a_bucket_leaves_before_the_replicas_of_its_process_are_added(preview, stack):
    return [], preview(stack)[1]


@fault("helios.replicas.gradients:GradientBuckets._move", BUCKETS)
def buckets_leave_as_backward_comes_to_them(move, buckets, number):
    bucket = buckets._bucket_of[number]
    order = list(buckets._buckets)
    if buckets._num_waiting[id(bucket)] == 1 and bucket in order[buckets._num_sent :]:
        order.remove(bucket)
        order.insert(buckets._num_sent, bucket)
        buckets._buckets = order
    move(buckets, number)


@fault("helios.replicas.named_sums:NumberReducer._read", f"{ELASTIC}[4-2-2]")
def hashes_of_batches_are_not_added_over_processes(read, reducer, tables, rows):
    found = read(reducer, tables, rows)
    reducer.totals = rows[0, 1 : 1 + len(reducer.totals)].tolist()
    return found


@fault(
    "helios.loops.optimizer:Updates._in_order",
    "tests/distributed/test_norms_of_steps.py"
    "::test_optimizers_of_one_loss_are_clipped_together[3-1]",
)
def the_norm_is_that_of_one_optimizer(in_order, updates, group):
    return [each for part in group[0].param_groups for each in part["params"]]

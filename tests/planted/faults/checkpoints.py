"""Faults in how a checkpoint is committed, verified, chosen and deleted."""

from __future__ import annotations

from tests.planted.planting import fault

STORE = "tests/checkpoint/test_store.py"
COMMIT = f"{STORE}::test_the_commit_is_the_rename_after_file_and_sidecar_are_on_the_disk"
KILLS = "tests/checkpoint/test_kills.py"
LOADING = "tests/checkpoint/test_loading.py"
RETENTION = "tests/checkpoint/test_retention.py"
SHARDED = "tests/checkpoint/test_sharded_folders.py"
TWO_RUNS = "tests/integration/test_two_runs.py"


@fault(
    "helios.storage.files:fsync",
    "tests/storage/test_files.py::test_a_sync_waits_for_all_bytes_of_its_file",
)
def nothing_waits_for_the_disk(fsync, handle):
    handle.flush()


@fault("helios.storage.codec:write_file", COMMIT)
def a_checkpoint_is_committed_before_it_is_on_the_disk(write_file, path, tree, *, hashes=False):
    from helios.storage import codec, files
    from helios.storage.digest import DigestWriter

    with files.create(path) as handle:
        writer = DigestWriter(handle, hashes=hashes)
        codec.write_encoded(writer, tree)
        return writer.digest()


@fault("helios.checkpoint.store:RunFolder._commit", COMMIT)
def older_checkpoints_are_deleted_before_the_new_name_is_on_the_disk(commit, folder, pending):
    from helios.storage import files

    files.make_folder(folder.path)
    sidecar = folder._write_file(pending)
    folder._apply_retention(pending.path, sidecar.run_name)
    return sidecar


@fault(
    "helios.checkpoint.store:RunFolder._write_file",
    "tests/checkpoint/test_store.py::test_the_commit_is_the_rename_after_file_and_sidecar_are_on_the_disk",
)
def a_checkpoint_is_committed_before_its_sidecar(write_file, folder, pending):
    from helios.checkpoint import file_names
    from helios.storage import codec, files

    unfinished = files.temporary_path(pending.path)
    digest = codec.write_file(unfinished, pending.code, hashes=True)
    files.replace(unfinished, pending.path)
    sidecar = write_file(folder, pending)
    assert digest
    assert file_names.sidecar_path(pending.path).exists()
    return sidecar


@fault(
    "helios.storage.codec:write_file",
    "tests/checkpoint/test_store.py::test_the_commit_is_the_rename_after_file_and_sidecar_are_on_the_disk",
)
def a_checkpoint_is_written_under_its_last_name(write_file, path, tree, *, hashes=False):
    from helios.storage import files

    final = path.with_suffix("")
    digest = write_file(final, tree, hashes=hashes)
    files.replace(final, path)
    return digest


@fault(
    "helios.checkpoint.sidecar:Sidecar.to_json",
    "tests/checkpoint/test_store.py::test_a_checkpoint_is_a_file_and_a_sidecar_with_its_digest",
)
def a_sidecar_holds_no_digest(to_json, sidecar):
    import dataclasses

    return to_json(dataclasses.replace(sidecar, digest=""))


@fault(
    "helios.checkpoint.contents:WholeFile.compare_bytes",
    "tests/checkpoint/test_loading.py::test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken",
)
def the_digest_of_a_checkpoint_is_not_compared(compare_bytes, content, sidecar, share=None):
    return True


@fault(
    "helios.storage.container_checks:check_container",
    "tests/checkpoint/test_loading.py::test_a_file_without_sidecar_is_still_checked_by_the_sums_of_its_container",
)
def sums_of_a_container_are_not_compared(check_container, path, watch=None):
    return None


@fault("helios.checkpoint.loading:check_agreement", "tests/checkpoint/test_mutations.py")
def name_sidecar_and_content_are_not_compared(check_agreement, name, payload, sidecar):
    return None


@fault(
    "helios.checkpoint.store:RunFolder._put_aside",
    "tests/checkpoint/test_loading.py::test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken",
)
def a_damaged_checkpoint_is_not_put_aside(put_aside, folder, path):
    return None


@fault(
    "helios.checkpoint.store:RunFolder._refuse_silent_restart",
    "tests/checkpoint/test_loading.py::test_when_all_are_damaged_no_start_begins_afresh_in_silence",
)
def a_run_whose_checkpoints_are_damaged_begins_anew(refuse, folder, damaged):
    return None


@fault(
    "helios.checkpoint.retention:plan",
    "tests/checkpoint/test_retention.py::test_the_newest_by_epoch_and_iteration_stay",
)
def retention_deletes_the_newest_checkpoint(plan, entries, options, protected=()):
    return sorted(entries)[-1:] if plan(entries, options, protected) else []


@fault(
    "helios.checkpoint.store:RunFolder.protect",
    "tests/checkpoint/test_store.py::test_retention_deletes_file_and_sidecar_but_not_the_one_resumed_from",
)
def retention_deletes_what_the_run_was_resumed_from(protect, folder, path):
    return None


@fault(
    "helios.checkpoint.retention:find_best",
    "tests/checkpoint/test_retention.py::test_of_equal_scores_the_earlier_stays",
)
def of_equal_scores_the_later_is_the_best(find_best, ranked, rule):
    import dataclasses

    best = find_best(ranked, dataclasses.replace(rule, count=len(ranked)))
    by_score = {entry.metrics[rule.metric]: entry for entry in sorted(best)}
    return [by_score[entry.metrics[rule.metric]] for entry in best[: rule.count]]


@fault("helios.checkpoint.file_names:select_checkpoints", "tests/checkpoint/test_file_names.py")
def the_newest_checkpoint_is_the_last_by_name(select_checkpoints, paths):
    return sorted(select_checkpoints(paths))


@fault("helios.storage.files:fsync_folder", "tests/storage/test_files.py::test_a_folder_is_synced")
def a_new_name_is_not_on_the_disk(fsync_folder, path):
    return None


@fault(
    "helios.storage.codec:_loading",
    "tests/checkpoint/test_loading.py::test_a_malicious_checkpoint_executes_nothing",
)
def loading_builds_any_type(loading, safe_types):
    import torch

    load = torch.load
    torch.load = lambda *args, **more: load(*args, **{**more, "weights_only": False})
    return loading(safe_types)


@fault(
    "helios.storage.folder_lock:FolderLock.acquire",
    "tests/integration/test_two_runs.py::test_a_second_fit_says_who_uses_the_folder_and_changes_nothing",
)
def the_folder_of_a_run_is_not_locked(acquire, lock):
    return None


@fault(
    "helios.storage.codec:encode_to_host",
    "tests/checkpoint/test_checkpoint_writer.py::test_the_file_holds_what_was_there_at_the_call",
)
def a_state_is_not_copied_before_training_goes_on(encode_to_host, tree, *, buffers, **more):
    from helios.storage import codec

    return codec.Captured(codec.encode(tree, where="", **more), True)


@fault(
    "helios.checkpoint.checkpoint_writer:PlainWriter._raise_own_failure",
    "tests/checkpoint/test_checkpoint_writer.py::test_other_failures_wait_for_the_next_safe_point_to_be_raised",
)
def an_error_of_a_save_in_a_thread_is_lost(raise_own_failure, writer):
    return None


@fault(
    "helios.checkpoint.checkpoint_writer:PlainWriter._announce_failure",
    "tests/integration/test_listeners.py::test_an_error_in_most_calls_ends_the_run",
)
def an_error_of_what_listens_to_saves_is_lost(announce_failure, writer, path, error):
    import contextlib

    for listener in writer._listeners:
        with contextlib.suppress(Exception):
            listener.save_failed(path, error)


@fault(
    "helios.checkpoint.sharded_commit:RankParts.collect",
    "tests/checkpoint/test_sharded_folders.py::test_rank_0_does_not_wait_for_ever",
)
def a_sharded_checkpoint_is_committed_before_all_parts_are_there(collect, parts, own, seconds):
    found = {0: own}
    for rank in range(1, parts.plan.num_ranks):
        found[rank] = parts._read(rank) or own
    return [found[rank] for rank in range(parts.plan.num_ranks)]


@fault(
    "helios.checkpoint.rank_part:SavePlan.note",
    "tests/checkpoint/test_sharded_folders.py::test_notes_of_an_earlier_save_to_the_same_path_do_not_count",
)
def notes_of_an_earlier_save_count(note, plan, rank):
    return plan.draft / f"rank-{rank:05d}.json"


@fault(
    "helios.storage.digest:VerifiedBlocks._is_good",
    "tests/checkpoint/test_sharded_folders.py::test_one_flipped_bit_anywhere_is_named",
)
def blocks_of_sharded_checkpoints_are_not_verified(is_good, blocks, number):
    return True


@fault(
    "helios.checkpoint.rank_part:_copy",
    "tests/checkpoint/test_sharded_folders.py::test_what_training_changes_after_the_copy_is_not_in_the_file",
)
def sharded_tensors_are_not_copied_before_training_goes_on(copy, rows, buffers):
    return dict(rows)


@fault(
    "helios.startup.checkpoint_search:check_run_name",
    "tests/integration/test_which_run.py::test_another_runs_folder_is_refused_by_both_names",
)
def the_checkpoint_of_another_run_is_taken(check_name, *args):
    return None


@fault(
    "helios.core.utils:collector_at_rest",
    "tests/storage/test_weights_only.py::test_the_collector_rests_while_a_tree_is_encoded",
)
def the_collector_goes_through_a_tree_that_is_encoded(collector_at_rest):
    import contextlib

    return contextlib.nullcontext()


@fault(
    "helios.state_graph.discovery:Discovery._compare",
    "tests/state_graph/test_save_times.py::test_a_run_on_a_slow_clock_saves_what_a_fast_one_saves",
)
def a_clock_decides_what_is_saved(compare, discovery, graph, *args):
    changes = compare(discovery, graph, *args)
    slow = [name for name, seconds in discovery.values.times._seconds.items() if seconds > 1]
    for name in slow:
        changes.nodes.pop(name, None)
    return changes


@fault(
    "helios.state_graph.save_times:SaveTimes.end",
    "tests/state_graph/test_save_times.py::test_a_slow_attribute_is_named_once_with_its_seconds",
)
def what_makes_saves_slow_is_not_named(end, times):
    return {}


@fault(
    "helios.core.memory:_bits",
    "tests/state_graph/test_partial_optimizers.py::test_a_zero_gets_the_sign_that_it_had",
)
def zeros_of_both_signs_are_the_same(bits, tensor):
    return tensor


@fault(
    "helios.session:Session.judge_scores",
    "tests/integration/test_one_best.py::test_each_validation_among_the_best_is_saved_and_the_best_stay",
)
def a_validation_among_the_best_is_saved_only_when_a_save_is_due(judge_scores, session):
    wanted = session.agreed.is_checkpoint_wanted
    has_improved = judge_scores(session)
    session.agreed.is_checkpoint_wanted = wanted
    return has_improved


@fault(
    "helios.best:rank_by_score",
    "tests/integration/test_one_best.py::test_each_validation_among_the_best_is_saved_and_the_best_stay",
)
def an_infinite_score_may_be_the_best(rank_by_score, scored, mode):
    finite = [(max(-1e9, min(score, 1e9)), each) for score, each in scored if score == score]
    return rank_by_score(finite, mode)


@fault(
    "helios.startup.best_validations:continue_best",
    "tests/integration/test_one_best.py::test_a_run_that_was_stopped_has_the_best_of_an_undisturbed_one",
)
def a_resumed_run_forgets_the_best(continue_best, stored, rule, **options):
    from helios.best import BestSoFar

    return BestSoFar(rule)


@fault(
    "helios.startup.model_in_hand:ModelInHand.leave_out_averages",
    "tests/integration/test_model_in_hand.py::test_an_average_is_swapped_in_until_the_script_changes_its_network",
)
def an_average_replaces_what_a_script_has_changed(leave_out_averages, in_hand, plugins):
    return {}


@fault(
    "helios.startup.fit_run:keep_in_hand",
    "tests/integration/test_model_in_hand.py::test_everything_else_loads_and_the_log_says_which_weights_and_why",
)
def the_newest_checkpoint_replaces_the_model_in_hand(keep_in_hand, run, end, **options):
    keep_in_hand(run, end, is_interrupted=True)


@fault(
    "helios.startup.fit_run:keep_in_hand",
    "tests/sharding/test_model_in_hand.py::test_an_omitted_checkpoint_is_the_newest",
)
def a_sharded_model_in_hand_is_evaluated_as_it_is(keep_in_hand, run, end, **options):
    keep_in_hand(run, end, **options)
    run.in_hand.obstacle = ""


@fault(
    "helios.startup.launch_call:_hand_over",
    "tests/integration/test_model_in_hand.py::test_shuffled_data_has_one_order_on_any_processes",
)
def spawned_ranks_draw_the_order_of_data_from_fresh_counters(hand_over, run, end):
    return hand_over(run, None)


@fault(
    "helios.startup.evaluation_run:_add_averages",
    "tests/integration/test_scored_averages.py::test_the_best_is_tested_with_the_average_that_was_scored",
)
def the_best_is_tested_without_its_average(add_averages, run, loaded):
    return None


@fault(
    "helios.checkpoint.status:Status.state",
    "tests/cli/test_situations.py::test_nothing_is_called_good_that_verify_calls_damaged",
)
def a_file_whose_bytes_nobody_has_read_is_called_good(state, status):
    return status.condition.value


@fault(
    "helios.cli.output:find_checkpoint",
    "tests/cli/test_situations.py::test_of_a_folder_the_checkpoint_counts_from_which_a_start_resumes",
)
def of_a_folder_the_oldest_checkpoint_is_taken(find_checkpoint, place, *, takes_best):
    from pathlib import Path

    from helios.checkpoint.file_names import find_checkpoints

    if Path(place).is_dir() and not takes_best:
        return find_checkpoints(Path(place))[0], None
    return find_checkpoint(place, takes_best=takes_best)


@fault(
    "helios.startup.fit_run:Training._load",
    "tests/integration/test_order.py::test_the_first_of_two_refusals_counts_and_no_file_of_the_run_changes",
)
def a_start_cuts_its_ledger_before_it_may_be_refused(load, training, session, record):
    for listener in training._listeners:
        listener.opened()
    load(training, session, record)

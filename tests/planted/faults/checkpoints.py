"""Faults in how a checkpoint is committed, verified, chosen and deleted."""

from __future__ import annotations

from tests.planted.planting import fault

STORE = "tests/checkpoint/test_store.py"


COMMIT = f"{STORE}::test_the_commit_is_the_rename_after_file_and_sidecar_are_on_the_disk"


@fault(
    "helios.storage.files:fsync",
    "tests/storage/test_files.py::test_a_sync_waits_for_all_bytes_of_its_file",
)
def nothing_waits_for_the_disk(fsync, handle):
    handle.flush()


@fault("helios.storage.codec:write_file", COMMIT)
def a_checkpoint_is_committed_before_it_is_on_the_disk(write_file, path, tree, *, hashes=False):
    from helios.storage import codec, files
    from helios.storage.files import DigestWriter

    with files.create(path) as handle:
        writer = DigestWriter(handle, hashes=hashes)
        codec.write_encoded(writer, tree)
        return writer.digest()


@fault("helios.checkpoint.store:RunFolder._commit", COMMIT)
def older_checkpoints_are_deleted_before_the_new_name_is_on_the_disk(commit, folder, pending):
    from helios.storage import files

    files.make_folder(folder.path)
    sidecar = folder._write(pending)
    folder._apply_retention(pending.path, sidecar.run_name)
    return sidecar


@fault(
    "helios.checkpoint.store:RunFolder._write",
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
    "helios.checkpoint.loading:WholeFile.compare_bytes",
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
    "helios.checkpoint.store:RunFolder.rename_damaged",
    "tests/checkpoint/test_loading.py::test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken",
)
def a_damaged_checkpoint_is_not_put_aside(rename_damaged, folder, path):
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
    "tests/checkpoint/test_trust.py::test_a_malicious_checkpoint_executes_nothing_and_is_named",
)
def loading_builds_any_type(loading):
    import torch

    load = torch.load
    torch.load = lambda *args, **more: load(*args, **{**more, "weights_only": False})
    return loading()


@fault(
    "helios.storage.folder_lock:FolderLock.acquire",
    "tests/integration/test_two_runs.py::test_a_second_fit_says_who_uses_the_folder_and_changes_nothing",
)
def the_folder_of_a_run_is_not_locked(acquire, lock):
    return None


@fault(
    "helios.storage.staging:HostBuffers.copy",
    "tests/checkpoint/test_checkpoint_writer.py::test_the_file_holds_what_was_there_at_the_call",
)
def a_state_is_not_copied_before_training_goes_on(copy, buffers, groups):
    return None


@fault(
    "helios.checkpoint.checkpoint_writer:PlainWriter._raise_own_failure",
    "tests/checkpoint/test_checkpoint_writer.py::test_other_failures_wait_for_the_next_safe_point_to_be_raised",
)
def an_error_of_a_save_in_a_thread_is_lost(raise_own_failure, writer):
    return None


@fault(
    "helios.storage.dcp_folder:RowWriter.write_data",
    "tests/sharding/test_sharded_checkpoints.py::test_a_full_disk_of_one_rank_ends_all_with_the_same_error",
)
def a_sharded_checkpoint_is_committed_without_a_part_that_failed(write_data, writer, *args):
    from torch.futures import Future

    try:
        return write_data(writer, *args)
    except OSError:
        nothing = Future()
        nothing.set_result([])
        return nothing


@fault(
    "helios.checkpoint.loading:ShardedFolder.compare_bytes",
    "tests/checkpoint/test_sharded_folders.py::test_one_flipped_bit_anywhere_is_named",
)
def digests_of_sharded_checkpoints_are_not_compared(compare_bytes, content, sidecar, share=None):
    return True


@fault(
    "helios.storage.dcp_folder:_require",
    "tests/checkpoint/test_sharded_folders.py::test_a_hostile_index_is_refused",
)
def the_index_of_a_sharded_checkpoint_is_believed(require, is_so, problem):
    return None


@fault(
    "helios.start.origin:check_run_name",
    "tests/integration/test_which_run.py::test_another_runs_folder_is_refused_by_both_names",
)
def the_checkpoint_of_another_run_is_taken(check_name, *args):
    return None


@fault(
    "helios.start.resume:_continue_best",
    "tests/integration/test_one_best.py::test_a_run_that_was_stopped_has_the_best_of_an_undisturbed_one",
)
def a_resumed_run_forgets_the_best(continue_best, record, rule):
    from helios.best import BestSoFar

    return BestSoFar(rule)


@fault(
    "helios.start.resume:load_checkpoint",
    "tests/integration/test_order.py::test_the_first_of_two_refusals_counts_and_no_file_of_the_run_changes",
)
def a_start_cuts_its_ledger_before_it_may_be_refused(load, training):
    for listener in training.parts.run_listeners:
        listener.opened()
    load(training)

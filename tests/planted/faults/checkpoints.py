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


@fault("helios.checkpoint.store:RunFolder.commit", COMMIT)
def older_checkpoints_are_deleted_before_the_new_name_is_on_the_disk(commit, folder, pending):
    from helios.storage import files

    files.make_folder(folder.path)
    sidecar = folder._write(pending)
    folder._apply_retention(pending.path, sidecar.run_name)
    return sidecar


@fault(
    "helios.checkpoint.retention:plan",
    "tests/checkpoint/test_retention.py::test_the_newest_by_epoch_and_iteration_stay",
)
def retention_deletes_the_newest_checkpoint(plan, entries, options, protected=()):
    return sorted(entries)[-1:] if plan(entries, options, protected) else []


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

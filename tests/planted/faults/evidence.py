"""Faults in what proves a run: its ledger, replays, and the points of loggers."""

from __future__ import annotations

from tests.planted.planting import fault

LINE = "tests/ledger/test_line.py"
WRITER = "tests/ledger/test_writer.py"
SCORES = "tests/ledger/test_validation_scores.py"
BUFFERS = "tests/ledger/test_buffers.py"


@fault("helios.ledger.line:seal", LINE)
def the_chain_of_hashes_is_not_continued(seal, body, chain):
    return seal(body, "")


@fault(
    "helios.ledger.line:unseal",
    "tests/ledger/test_verification.py::test_every_change_of_a_single_byte_is_found",
)
def the_hash_of_a_line_is_not_compared(unseal, data, chain):
    import json

    from helios.ledger import line

    return json.loads(data[: -line.TAIL_BYTES] + b"}"), line.stated_hash(data)


@fault("helios.ledger.line:_digits", WRITER)
def a_line_rounds_its_numbers(digits, number):
    import struct

    return digits(struct.unpack("f", struct.pack("f", number))[0])


@fault("helios.ledger.writer:write_iteration", WRITER)
def a_line_leaves_out_the_losses(write_iteration, place, hashes, losses, **rest):
    return write_iteration(place, hashes, losses={}, **rest)


@fault("helios.ledger.writer:add_up", WRITER)
def a_line_leaves_out_the_samples(add_up, block, contents, indices):
    return add_up(block, contents, None)


@fault("helios.storage.content_hash:factor_of", WRITER)
def the_hash_of_samples_leaves_out_the_replica(factor, replica):
    return factor(0)


@fault("helios.storage.content_hash:_Reader._read_tensor", "tests/storage/test_content_hash.py")
def the_hash_of_a_batch_leaves_out_its_elements(read_tensor, reader, tensor):
    read_tensor(reader, tensor.new_zeros(tensor.shape))


@fault("helios.ledger.writer:digest_weights", WRITER)
def a_line_leaves_out_the_state_of_optimizers(digest_weights, weights, optimizers):
    return digest_weights(weights, {})


@fault(
    "helios.ledger.verification:_check_digests",
    "tests/ledger/test_run_file.py::test_a_replaced_checkpoint_is_found_though_its_sidecar_matches",
)
def a_replaced_checkpoint_is_good(check_digests, folder, digests):
    return ()


@fault(
    "helios.ledger.compare:LedgerFollower.append",
    "tests/ledger/test_replay.py::test_a_changed_script_is_found_where_it_differs_first",
)
def a_replay_compares_nothing(append, follower, bodies):
    for body in bodies:
        follower.found.num_equal += "end" not in body
        follower.found.has_ended |= "end" in body


@fault("helios.ledger.compare:LineComparison.compare_scores", SCORES)
def scores_of_runs_are_not_compared(compare_scores, found, one, other):
    found.num_scored = 3


@fault("helios.ledger.verification:_check_scores", SCORES)
def scores_of_checkpoints_are_not_verified(check_scores, status, stated, recorded):
    status.num_scored = 1


@fault("helios.ledger.book:Book.append_scores", SCORES)
def scores_are_lines_of_the_chain(append_scores, book, after, scores, unscored):
    from helios.ledger import line

    book.append([line.describe_scores(scores, unscored, after)])


@fault("helios.ledger.line:describe_scores", SCORES)
def the_ledger_has_scores_that_differ_between_equal_runs(describe, scores, unscored, *rest):
    return describe(scores, (), *rest)


@fault("helios.ledger.writer:hash_buffer", BUFFERS)
def the_hash_of_a_buffer_is_that_of_its_form(hash_buffer, buffer):
    return hash_buffer(buffer * 0)


@fault("helios.state.discovery:Discovery.saved_modules", BUFFERS)
def buffers_of_networks_that_are_not_saved_count(saved_modules, discovery):
    return discovery.modules()


@fault(
    "helios.ledger.compare:_read_complete_lines",
    "tests/ledger/test_compare.py::test_half_a_line_that_is_being_written_is_no_iteration",
)
def half_a_line_that_is_being_written_is_compared(read_complete_lines, path):
    from helios.ledger.book import read_lines

    return read_lines(path)


@fault("helios.ledger.writer:LedgerWriter.validated", SCORES)
def scores_come_before_the_line_of_their_iteration(validated, writer, validation):
    settle, writer.settle = writer.settle, lambda: None
    validated(writer, validation)
    writer.settle = settle


@fault(
    "helios.plugins.server_loggers:WandbLogger._find_last_step",
    "tests/plugins/test_server_loggers.py::test_each_point_of_a_killed_run_is_there_once",
)
def a_start_does_not_read_what_offline_files_of_wandb_have(find_last_step, logger):
    return -1


@fault(
    "helios.plugins.server_loggers:ServerLogger.state_dict",
    "tests/plugins/test_server_loggers.py::test_each_point_of_a_killed_run_is_there_once",
)
def a_checkpoint_lacks_what_the_server_has_not_taken(state_dict, logger):
    return {"rows": []}

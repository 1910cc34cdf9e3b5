"""Faults that are tied to source text, in rooms that are still to be rebuilt.

A fault replaces one piece of text by another, in a copy of the tree. New faults are not added here:
they go into tests/planted/faults, by name. This list only shrinks. A room that is rebuilt takes its
faults along: what they showed is shown by name then, or by mutants (scripts/mutate.py).
Run by ``scripts/faults --text``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.started import end_all, started

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240
PASSED, FAILED = "passed", "failed"
RESUME = "tests/integration/test_resume.py"
CHANNELS = "tests/integration/test_channels.py"
YIELDS = "tests/loops/test_yielding.py"
AVERAGES = "tests/plugins/test_averaging.py"
ELASTIC = "tests/distributed/test_elastic.py"
SAME_BITS = f"{ELASTIC}::test_any_number_of_processes_gives_the_same_bits"
SAVER = "tests/checkpoint/test_checkpoint_writer.py"
SAVE_FAULTS = "tests/integration/test_save_faults.py"
FOREIGN = "tests/data/test_external_loader.py"
OTHER_DATA = "tests/integration/test_other_data.py"
STAGES = "tests/integration/test_stages.py"
TWO_RUNS = "tests/integration/test_two_runs.py"
SIGNALS = "tests/integration/test_signals.py"
BUCKETS = "tests/distributed/test_buckets.py"
EXCHANGES = "tests/distributed/test_exchanges.py"
COMMANDS = "tests/cli/test_commands.py"
ALIASES = "tests/state_graph/test_aliases.py"
BLOCKS = "tests/state_graph/test_shared_views.py"
BLOCK_SIZES = "tests/state_graph/test_shared_view_sizes.py"
FORMS = "tests/state_graph/test_tensor_formats.py"
OPTIMIZERS = "tests/state_graph/test_optimizers.py"
PARTIAL = "tests/state_graph/test_partial_networks.py"
EXTRA_STATES = "tests/state_graph/test_extra_states.py"
PARTIAL_OPTIMIZERS = "tests/state_graph/test_partial_optimizers.py"
MIGRATIONS = "tests/migration/test_migrations.py"
LEVELS = "tests/startup/test_levels.py"
TRIAL = "tests/data/test_loader_state_check.py"
RECORD = "tests/checkpoint/test_record.py"
AUDITS = "tests/audit/test_step_audit.py"
MIGRATED_RUNS = "tests/integration/test_migrated_runs.py"
SHARDED = "tests/sharding/test_sharded_training.py"
USER_STEPS = "tests/sharding/test_steps_of_users.py"
KEYED_RUNS = "tests/sharding/test_keyed_training.py"
RESTORED = "tests/sharding/test_restored_averages.py"
UNREAD = "tests/sharding/test_unread_tensors.py"
SHARDED_SAVES = "tests/sharding/test_sharded_checkpoints.py"
REWINDS = "tests/integration/test_rewind.py"
TRACKERS = "tests/plugins/test_tracker.py"
EXPORTS = "tests/checkpoint/test_export_folders.py"
CHOSEN = "tests/integration/test_chosen_checkpoint.py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One planted fault: what breaks, where, and the test that must see it."""

    name: str
    file: str
    good: str
    bad: str
    test: str


FAULTS = (
    Fault(
        "each process reads averages of sharded models whole",
        "helios/startup/run_setup.py",
        "for name, part in self.plugins.items() if part.loads_shards]",
        "for name, part in self.plugins.items() if not part]",
        f"{KEYED_RUNS}::test_no_process_holds_more_than_its_part_of_an_average",
    ),
    Fault(
        "each process reads the weights of another run whole",
        "helios/startup/model_setup.py",
        "load(replicas.share)",
        "load(None)",
        f"{KEYED_RUNS}::test_no_process_reads_more_than_its_part_of_the_weights_of_another_run",
    ),
    Fault(
        "a plugin that refers to a sharded parameter gets a tensor without values",
        "helios/checkpoint/contents.py",
        "place = (is_deferred, ",
        "place = (False, ",
        f"{RESTORED}::test_a_plugin_that_knows_of_no_shards_gets_whole_tensors",
    ),
    Fault(
        "averages of a finished sharded run have no values",
        "helios/plugins/averaged_weights.py",
        "{name: value_of(average) for name",
        "{name: average for name",
        f"{RESTORED}::test_a_finished_run_has_them",
    ),
    Fault(
        "the last damaged block is named",
        "helios/storage/digest.py",
        "return list(pool.map(check, numbers))",
        "return list(pool.map(check, numbers[::-1]))",
        "tests/storage/test_hashed_blocks.py::test_the_first_damaged_block_of_a_range_is_found",
    ),
    Fault(
        "a full ledger names replicas in the order of processes",
        "helios/startup/run_evidence.py",
        "gather=replicas.gather_replicas,",
        "gather=lambda own: [each for part in replicas.gather_objects(own) for each in part],",
        "tests/sharding/test_full_ledgers.py::test_they_are_those_of_whole_models",
    ),
    Fault(
        "a full ledger of shards is read by one process only",
        "helios/ledger/writer.py",
        "        if self._tensors.reads_weights:",
        "        if self._book is not None:",
        "tests/sharding/test_full_ledgers.py::test_they_are_those_of_whole_models",
    ),
    Fault(
        "all units are made before the first one is cut",
        "helios/startup/model_setup.py",
        "        mark(init.initialize(modules[name]))",
        "        mark(init.initialize(part for parts in modules.values() for part in parts))",
        f"{KEYED_RUNS}::test_no_process_holds_more_than_its_shards_and_a_unit",
    ),
    Fault(
        "units that processes initialize in different ways are not compared",
        "helios/state_graph/consistency.py",
        "    own = {**(marks or {}), **_marks_of(discovery, loose)}",
        "    own = _marks_of(discovery, loose)",
        f"{KEYED_RUNS}::test_processes_that_initialize_in_different_ways_are_named",
    ),
    Fault(
        "the note of a rank is written before its file",
        "helios/checkpoint/rank_part.py",
        "            text = self.write().to_json()\n"
        "            _leave(self.plan.note(self._rank), text)",
        "            files.make_folder(self.plan.draft)\n"
        '            _leave(self.plan.note(self._rank), "{}")\n'
        "            text = self.write().to_json()",
        "tests/checkpoint/test_kills.py",
    ),
    Fault(
        "a part that could not be written is not reported to rank 0",
        "helios/checkpoint/checkpoint_writer.py",
        "                self._newest_parts.fail(token, text)",
        "                pass",
        f"{SHARDED_SAVES}::test_a_full_disk_of_one_rank_ends_all_with_the_same_error",
    ),
    Fault(
        "damage that one process has found ends the start",
        "helios/startup/checkpoint_search.py",
        "        except DamagedCheckpointError as error:\n            return str(error)\n",
        "        except ZeroDivisionError as error:\n            return str(error)\n",
        f"{SHARDED_SAVES}::"
        "test_damage_that_only_one_process_can_see_leads_all_to_an_older_checkpoint",
    ),
    Fault(
        "values of sharded modules beside their state_dict are not saved",
        "helios/state_graph/attribute_rules.py",
        "    return not class_of(module).__module__",
        "    return not type(module).__module__",
        f"{USER_STEPS}::test_values_of_modules_are_saved_on_several_processes_too",
    ),
    Fault(
        "units that processes call in a validation are not compared",
        "helios/loops/evaluation.py",
        "        self._session.gradients.compare_calls()\n",
        "",
        "tests/sharding/test_unit_calls.py::test_those_of_a_validation_are_named_at_its_end",
    ),
    Fault(
        "a process that computes along keeps what its repeated step has changed",
        "helios/loops/repeated_steps.py",
        "        before.put_back()",
        "        pass",
        f"{SHARDED}::test_sharded_networks_have_the_bits_of_whole_ones",
    ),
    Fault(
        "the order of accumulation is not stored",
        "helios/startup/run_identity.py",
        '        found["accumulation_order"] = "micro-batches"',
        "        pass",
        f"{SHARDED}::test_what_sums_in_another_order_must_not_change",
    ),
    Fault(
        "a validation of a sharded model leaves what its repeated step has changed",
        "helios/loops/evaluation.py",
        "        before.put_back()",
        "        pass",
        f"{SHARDED}::test_validations_end_together_and_count_once",
    ),
    Fault(
        "each process names the gradients of its own shards only",
        "helios/plugins/nan_guard.py",
        "    return _Report(losses, dict(sorted(gradients.items())))",
        "    return _Report(losses, found[0].gradients if found else {})",
        "tests/sharding/test_sharded_training.py::test_shards_that_are_not_finite_are_named_by_all",
    ),
    Fault(
        "reading a stream at the end of an epoch changes what hooks draw",
        "helios/data/stream_source.py",
        "        with rng.stream(_ANY_KEY):\n            self._begin()",
        "        if self._is_begun:\n            self._begin()",
        "tests/integration/test_streams.py::test_a_run_on_a_stream_resumes_everywhere",
    ),
    Fault(
        "a replay of a stream does not seed its batches",
        "helios/data/stream.py",
        "            rng.reseed(self._keys.at(first // self._size))",
        "            rng.reseed(self._keys.at(0))",
        "tests/data/test_stream.py::test_a_replay_gives_the_tail_of_the_epoch",
    ),
    Fault(
        "a stream divides itself among loader workers",
        "helios/data/stream.py",
        "            torch_worker._worker_info = None",
        "            torch_worker._worker_info = info",
        "tests/data/test_stream.py::test_workers_change_nothing",
    ),
    Fault(
        "what a part of a stream draws while it is opened is not seeded",
        "helios/data/stream.py",
        '        rng.reseed(rng.key("stream", position.order_key(), plan.seed, replica))',
        "        position.order_key()",
        "tests/data/test_stream.py::test_processes_change_nothing",
    ),
    Fault(
        "a checkpoint holds the states of a stream's parts of rank 0 only",
        "helios/data/stream_source.py",
        "        parts = {name: part for state in states for name, part in",
        "        parts = {name: part for state in states[:1] for name, part in",
        "tests/data/test_stream.py"
        "::test_a_state_gives_the_tail_of_the_epoch_on_any_number_of_processes",
    ),
    Fault(
        "a part of a stream that has ended starts over at a resume",
        "helios/data/stream.py",
        "            is_over = len(samples) < self._size",
        "            is_over = not samples",
        "tests/integration/test_streams.py::test_a_run_on_a_stream_resumes_everywhere",
    ),
    Fault(
        "states of a stream's parts are used without a test",
        "helios/startup/reproducibility_level.py",
        "    if name and try_state(source.for_trial()) is Verdict.KEPT:",
        "    if name:",
        "tests/integration/test_streams.py::test_a_run_on_a_stream_resumes_everywhere",
    ),
    Fault(
        "a pack begins at the start of its first sample",
        "helios/data/packed.py",
        "                yield Piece(sample, position - first, end - first)",
        "                yield Piece(sample, 0, end - first)",
        "tests/data/test_packed.py::test_each_token_is_in_one_pack",
    ),
    Fault(
        "whole samples go into the emptiest pack",
        "helios/data/packed.py",
        "        place = bisect_left(spaces, (size, 0))",
        "        place = max(bisect_left(spaces, (size, 0)), len(spaces) - 1)",
        "tests/data/test_packed.py::test_whole_samples_fill_the_space_that_is_left",
    ),
    Fault(
        "the sources of a mixture begin anew in each epoch",
        "helios/data/mixture.py",
        "        first = self.epoch * length\n        position, end",
        "        first = 0\n        position, end",
        "tests/data/test_mixture.py::test_the_sources_continue_over_the_epochs_of_a_run",
    ),
    Fault(
        "all epochs of a mixture's source have one order",
        "helios/data/mixture.py",
        "            keys += [rng.key(*fields, each) for each in epochs]",
        "            keys += [rng.key(*fields, 0) for each in epochs]",
        "tests/data/test_mixture.py::test_each_source_is_used_up_before_it_begins_again",
    ),
    Fault(
        "the samples of a mixture that are enciphered again are of other sources",
        "helios/data/permutation.py",
        "else _pick(self._parts, stray)",
        "else _pick(self._parts, slice(len(stray)))",
        "tests/data/test_mixture.py::test_each_source_is_used_up_before_it_begins_again",
    ),
    Fault(
        "a single sample that is enciphered again is of another source",
        "helios/data/permutation.py",
        "else _pick(self._parts, place)",
        "else _pick(self._parts, 0)",
        "tests/data/test_mixture.py::test_each_source_is_used_up_before_it_begins_again",
    ),
    Fault(
        "a single sample is enciphered again in other rounds than many",
        "helios/data/permutation.py",
        "+ second) * _FACTORS[1] & _WORD",
        "+ second * _FACTORS[1]) & _WORD",
        "tests/data/test_permutation.py"
        "::test_single_positions_have_the_samples_that_they_have_among_many",
    ),
    Fault(
        "a mixture's sources of one length share their order",
        "helios/data/permutation.py",
        "places = orders.searchsorted(rows[here])",
        "places = np.zeros_like(here)",
        "tests/data/test_mixture.py::test_the_order_stays_what_it_is",
    ),
    Fault(
        "the weights of a mixture are not compared at a resume",
        "helios/startup/run_identity.py",
        '    if description.get("mixture"):',
        '    if description.get("mixed"):',
        "tests/integration/test_mixtures.py::test_other_weights_are_refused_until_they_are_allowed",
    ),
    Fault(
        "steps without data are numbered anew in each epoch",
        "helios/data/steps.py",
        "        self._first = epoch * (n or 0)",
        "        self._first = 0",
        "tests/data/test_steps.py::test_each_step_of_each_replica_has_a_number_of_its_own",
    ),
    Fault(
        "an endless pass of steps begins at 0 when a run resumes",
        "helios/data/steps.py",
        "        numbers = count(batch) if n is None else range(batch, n)",
        "        numbers = count() if n is None else range(batch, n)",
        "tests/integration/test_steps.py::test_a_run_without_data_resumes_everywhere",
    ),
    Fault(
        "a tracker mixes the points of a rewound run with those of before",
        "helios/startup/fit_run.py",
        "        session.went_back = self._start.is_branch or bool(self._start.plans)",
        "        session.went_back = False",
        f"{TRACKERS}::test_going_back_on_purpose_is_another_run",
    ),
    Fault(
        "the package imports PyTorch before a name is used",
        "helios/__init__.py",
        "from helios.core.moved import install_moved_modules\n",
        "import torch\n\nfrom helios.core.moved import install_moved_modules\n",
        "tests/test_deferred.py::test_the_first_use_of_a_name_binds_all_of_them",
    ),
    Fault(
        "the first use of a name binds that name only",
        "helios/deferred.py",
        'for known in names["__all__"] if known in found',
        "for known in [name] if known in found",
        "tests/test_deferred.py::test_the_first_use_of_a_name_binds_all_of_them",
    ),
    Fault(
        "listing checkpoints imports PyTorch",
        "helios/checkpoint/loading.py",
        "from helios.checkpoint.sidecar import Sidecar, check_schema\n",
        "from helios.checkpoint.sidecar import Sidecar, check_schema\n"
        "from helios.storage import codec\n",
        "tests/test_deferred.py::test_commands_that_read_text_import_no_pytorch",
    ),
    Fault(
        "a parameter that is shared counts twice in the banner",
        "helios/startup/run_log.py",
        "    seen.update(map(id, new))",
        "    pass",
        "tests/startup/test_run_summary.py::test_a_shared_parameter_counts_once",
    ),
    Fault(
        "the bar of a notebook keeps the total of the first epoch",
        "helios/terminal/screen.py",
        "            self.container.children[1].max = self.total or 1",
        "            pass",
        "tests/terminal/test_screen.py::test_a_notebook_has_bars_of_its_own",
    ),
    Fault(
        "the first hour: resume=<path> is not what an evaluation loads",
        "helios/startup/checkpoint_search.py",
        "    if asked is None and not has_fitted:",
        "    if asked is None and has_fitted:",
        f"{CHOSEN}::test_the_file_of_resume_is_evaluated_until_the_trainer_has_trained",
    ),
    Fault(
        "the first hour: the best checkpoint is the newest one",
        "helios/startup/checkpoint_search.py",
        "    if choice.is_best:\n        return Best",
        "    if not choice.is_best:\n        return Best",
        f"{CHOSEN}::test_each_evaluation_loads_what_it_is_asked_for",
    ),
    Fault(
        "the first hour: a typo of valid_step is not named",
        "helios/startup/run_log.py",
        "    elif validates and _computes_nothing(model):",
        "    elif not validates and _computes_nothing(model):",
        "tests/startup/test_idle_options.py"
        "::test_a_missing_validation_step_is_named_with_what_may_be_meant",
    ),
    Fault(
        "the first hour: an error is shown by the log, too",
        "helios/terminal/root_logger.py",
        '        if getattr(record, "is_raised", False):',
        '        if getattr(record, "is_shown", False):',
        "tests/terminal/test_shown_errors.py"
        "::test_the_screen_shows_an_error_once_and_the_log_file_all_of_it",
    ),
    Fault(
        "an audit does not put back the buffers that a repeated step has changed",
        "helios/loops/repeated_steps.py",
        "            before.put_back()",
        "            pass",
        f"{AUDITS}::test_a_step_that_uses_its_buffers_is_repeated_with_those_that_it_started_from",
    ),
    Fault(
        "an audit draws other random numbers than the step",
        "helios/loops/repeated_steps.py",
        "        set_generators(session.model, self.generators)",
        "        pass",
        f"{AUDITS}::test_an_audited_run_has_the_bits_and_the_events_of_one_that_is_not",
    ),
    Fault(
        "an audit leaves the generators where the repeated step has left them",
        "helios/loops/repeated_steps.py",
        "            set_generators(session.model, generators)",
        "            pass",
        f"{AUDITS}::test_hooks_after_an_audit_draw_the_same_random_numbers",
    ),
    Fault(
        "an audit does not lower the level",
        "helios/checkpoint/reproducibility.py",
        "    FindingKind.MISMATCH: Level.ORDER,\n",
        "",
        f"{AUDITS}::test_a_mismatch_lowers_the_level_of_all_later_checkpoints",
    ),
    Fault(
        "optimizers that shared their groups go separate ways",
        "helios/state_graph/optimizers.py",
        "        view.holder[view.attribute] = getattr(view.optimizer, view.table)",
        "        pass",
        "tests/state_graph/test_inner.py"
        "::test_optimizers_that_share_their_groups_share_them_after_a_resume",
    ),
    Fault(
        "what the state_dict of a network leaves out is not filled in",
        "helios/state_graph/custom_state_dicts.py",
        '            _put(f"{path}.{name}", pieces[name], saved)',
        "            pass",
        f"{PARTIAL}::test_what_a_network_leaves_out_resumes_to_the_same_bits",
    ),
    Fault(
        "a frozen backbone is saved beside the state that leaves it out",
        "helios/state_graph/custom_state_dicts.py",
        "if name not in before or is_sharded(value) or before[name] != self._mark(value)",
        "if True",
        f"{PARTIAL}::test_a_frozen_backbone_is_neither_saved_nor_named",
    ),
    Fault(
        "a name that the state lacked is looked for in it",
        "helios/state_graph/module_state.py",
        "    missing, unexpected = value.load_state_dict(state, strict=False)",
        "    missing, unexpected = value.load_state_dict(state)",
        f"{PARTIAL}::test_what_a_network_leaves_out_resumes_to_the_same_bits",
    ),
    Fault(
        "any name may be lacking in the state of a network",
        "helios/state_graph/module_state.py",
        "    if lacking or unknown:",
        "    if False:",
        f"{PARTIAL}::test_a_state_that_lacks_a_name_that_was_saved_is_refused",
    ),
    Fault(
        "published wrappers lack what torch relies on",
        "helios/state_graph/module_state.py",
        "            table.setdefault(name, OrderedDict())",
        "            pass",
        f"{PARTIAL_OPTIMIZERS}::test_what_an_optimizer_leaves_out_resumes_to_the_same_bits",
    ),
    Fault(
        "a run that begins in a place where no folder can be made prepares its data first",
        "helios/startup/launch_call.py",
        "        require_writable(call.options, model.save_name)",
        "        pass",
        "tests/distributed/test_processes.py"
        "::test_a_folder_that_cannot_be_made_is_refused_by_all_before_the_data_is_prepared",
    ),
    Fault(
        "a run that goes on where nothing can be written trains to its first save",
        "helios/startup/fit_run.py",
        "    on_first(replicas, lambda: require_writable(options, name))",
        "    pass",
        "tests/integration/test_disks.py"
        "::test_a_disk_that_cannot_be_written_to_is_refused_before_the_first_step",
    ),
    Fault(
        "attributes of modules with an extra state are not looked at",
        "helios/state_graph/attribute_rules.py",
        "    return not class_of(module).__module__.startswith(_WRAPPERS)",
        '    return "get_extra_state" not in vars(type(module))',
        f"{EXTRA_STATES}::test_attributes_that_an_extra_state_leaves_out_come_back",
    ),
    Fault(
        "an extra state that stays the same is trusted",
        "helios/state_graph/custom_state_dicts.py",
        "    telling = {path for path in lacking & now.keys() if now[path] != before.get(path)}",
        "    telling = lacking & now.keys()",
        f"{EXTRA_STATES}"
        "::test_what_no_checkpoint_holds_is_left_to_an_extra_state_that_changes[run]",
    ),
    Fault(
        "an optimizer in the state of a model is loaded by position",
        "helios/checkpoint/capture.py",
        "    run.owner_states.prepare(record.owners)",
        "    pass",
        "tests/integration/test_own_states.py"
        "::test_an_optimizer_in_the_state_of_a_model_follows_its_parameters",
    ),
    Fault(
        "an equal value under any key counts as a copy",
        "helios/state_graph/state_dict_coverage.py",
        "        known = [self._state[name] for name in names if name in self._state]",
        "        known = [*self._state.values()]",
        "tests/state_graph/test_inner.py::test_a_state_dict_of_the_owner_covers_what_it_holds",
    ),
    Fault(
        "class attributes are not looked at",
        "helios/state_graph/unsavable.py",
        "        reasons.OF_CLASS: class_marks(kinds, graph.content),",
        "        reasons.OF_CLASS: {},",
        "tests/state_graph/test_named.py::test_class_attributes_that_training_changes_are_named",
    ),
    Fault(
        "scripted networks are not looked at",
        "helios/state_graph/unsavable.py",
        "        reasons.OF_SCRIPT: script_marks(graph.found, graph.content),",
        "        reasons.OF_SCRIPT: {},",
        "tests/state_graph/test_named.py::test_attributes_of_scripted_and_traced_networks_are_named",
    ),
    Fault(
        "attributes of Helios' own classes count as the user's",
        "helios/state_graph/owner_states.py",
        '    return frozenset(" ".join(declared).split())',
        "    return frozenset()",
        "tests/state_graph/test_owner_states.py::test_attributes_of_base_classes_do_not_count",
    ),
    Fault(
        "a data set is read",
        "helios/state_graph/attribute_rules.py",
        "        if left < 0:",
        "        if False:",
        "tests/state_graph/test_owner_states.py::test_of_a_data_set_only_small_values_and_generators_count",
    ),
    Fault(
        "what differs between processes is taken for the same",
        "helios/checkpoint/capture.py",
        "        run.findings.add(FindingKind.OBSTACLE, text=text)",
        "        pass",
        f"{RECORD}::test_what_an_owner_holds_on_one_process_goes_back_to_that_process",
    ),
    Fault(
        "parameters that join an optimizer bring gradients along",
        "helios/loops/optimizer.py",
        "            session.gradients.drop_old(self._find_optimizer())",
        "            pass",
        "tests/distributed/test_joined_late.py"
        "::test_parameters_that_join_an_optimizer_train_alike_on_any_number_of_processes",
    ),
    Fault(
        "what replicas change in plugins is not looked for",
        "helios/state_graph/consistency.py",
        "        for name, watch in self._others:",
        "        for name, watch in ():",
        "tests/integration/test_matrix.py::test_what_training_changed_is_saved_or_named",
    ),
    Fault(
        "the data module puts back a loader that has read ahead",
        "helios/startup/state_owners.py",
        '        others |= {"<data 0>": source.loader, "<data 1>": source.resumes_by.holder}',
        "        pass",
        "tests/integration/test_data.py::test_a_loader_with_state_resumes_exactly",
    ),
    Fault(
        "what one process lacks is known to it only",
        "helios/checkpoint/capture.py",
        "in run.replicas.gather_objects((missing, misfits, own_claims)):",
        "in [(missing, misfits, own_claims)]:",
        f"{RECORD}::test_what_is_missing_is_joined_over_owners_and_processes",
    ),
    Fault(
        "an incomplete checkpoint is written though it was refused",
        "helios/startup/fit_run.py",
        '        if missing and self._run.options.on_incomplete == "raise":',
        "        if False:",
        f"{LEVELS}::test_an_incomplete_checkpoint_can_be_refused_before_anything_is_written",
    ),
    Fault(
        "nothing is said of an incomplete checkpoint that is loaded",
        "helios/startup/fit_run.py",
        "        if not missing:",
        "        if True:",
        f"{LEVELS}::test_fit_warns_once_when_it_loads_an_incomplete_checkpoint",
    ),
    Fault(
        "the finding of a trial is forgotten at a resume",
        "helios/startup/reproducibility_level.py",
        "        if place in missing:",
        "        if False:",
        f"{LEVELS}::test_fit_warns_once_when_it_loads_an_incomplete_checkpoint",
    ),
    Fault(
        "a trial moves the generators",
        "helios/data/loader_state_check.py",
        "        rng.load_rng_state_dict(found)",
        "        pass",
        f"{TRIAL}::test_a_trial_leaves_the_loader_and_all_generators_as_they_were",
    ),
    Fault(
        "a trial moves the old generator of NumPy",
        "helios/data/loader_state_check.py",
        "        np.random.set_state(legacy)",
        "        pass",
        f"{TRIAL}::test_a_trial_leaves_the_loader_and_all_generators_as_they_were",
    ),
    Fault(
        "a trial uses the loader of the run",
        "helios/data/loader_state_check.py",
        "    undisturbed = copy.deepcopy(source)",
        "    undisturbed = source",
        f"{TRIAL}::test_a_trial_leaves_the_loader_and_all_generators_as_they_were",
    ),
    Fault(
        "a trial has no limit of time",
        "helios/data/loader_state_check.py",
        "        if clock() > deadline:",
        "        if clock() < 0:",
        f"{TRIAL}::test_a_trial_that_takes_more_than_two_seconds_says_nothing",
    ),
    Fault(
        "a trial copies any amount of data",
        "helios/data/loader_state_check.py",
        "        if size > _MAX_BYTES:",
        "        if size < 0:",
        f"{TRIAL}::test_much_data_is_not_copied_for_a_trial",
    ),
    Fault(
        "inductor keeps the level",
        "helios/startup/reproducibility_level.py",
        "    if compiled:\n",
        "    if False:\n",
        f"{LEVELS}::test_inductor_lowers_the_level_without_a_warning",
    ),
    Fault(
        "every backend of torch.compile lowers the level",
        "helios/startup/reproducibility_level.py",
        "    return configure is None or configure() is not None",
        "    return True",
        f"{LEVELS}::test_inductor_lowers_the_level_without_a_warning",
    ),
    Fault(
        "what is compiled after the start keeps the level",
        "helios/startup/reproducibility_level.py",
        "        return level.at_most(Level.ORDER) if is_compiled else level",
        "        return level",
        f"{LEVELS}::test_a_network_that_is_compiled_later_lowers_the_level_of_its_checkpoints",
    ),
    Fault(
        "sidecars of earlier versions are damaged",
        "helios/checkpoint/sidecar.py",
        "        known = copy.deepcopy(_OPTIONAL)",
        "        known: dict[str, Any] = {}",
        "tests/checkpoint/test_sidecar.py"
        "::test_a_sidecar_of_an_earlier_version_is_whole_and_its_new_fields_are_empty",
    ),
    Fault(
        "plain attributes of other owners are not given back",
        "helios/checkpoint/capture.py",
        "    run.owner_states.restore(record.owners)",
        "    pass",
        f"{RECORD}::test_what_was_captured_is_applied",
    ),
    Fault(
        "what hooks add to a checkpoint is lost",
        "helios/checkpoint/record.py",
        "if key not in absent} | self.extra",
        "if key not in absent}",
        f"{RECORD}::test_what_hooks_add_is_kept_and_shown_to_them_again",
    ),
    Fault(
        "ls is silent about what checkpoints lack",
        "helios/cli/checkpoints.py",
        "    return texts[:_MAX_REASONS]",
        "    return []",
        f"{LEVELS}::test_a_state_that_is_not_kept_makes_the_level_incomplete_everywhere",
    ),
    Fault(
        "an import of a module that is gone says nothing",
        "helios/__init__.py",
        "install_moved_modules()\n",
        "\n",
        "tests/core/test_moved.py",
    ),
    Fault(
        "the storage of a lazy parameter is measured",
        "helios/state_graph/state_size.py",
        "    if is_lazy(tensor):",
        "    if False:",
        "tests/integration/test_odd_tensors.py",
    ),
    Fault(
        "a look at the state begins a run",
        "helios/state_graph/discovery.py",
        "            unchanged = copy.copy(self)",
        "            unchanged = self",
        "tests/model/test_model.py::test_the_state_before_any_run_is_what_there_is",
    ),
    Fault(
        "a plugin that only saves a state is refused",
        "helios/startup/objects.py",
        ", may_show=True",
        "",
        "tests/startup/test_registration.py::test_a_plugin_may_save_a_state_that_nobody_loads",
    ),
    Fault(
        "the generator that a sampler holds is not saved",
        "helios/data/replayed_sampler.py",
        "    return OwnGenerators(generators) if generators else None",
        "    return None",
        "tests/integration/test_data.py"
        "::test_a_stock_sampler_with_a_generator_of_its_own_resumes_exactly",
    ),
    Fault(
        "a stream that begins anew at its end repeats the pass",
        "helios/data/external_loader.py",
        "            if self._source.begins_at_end(is_empty=self._following is _END):",
        "            if False:",
        "tests/integration/test_data.py::test_a_stream_with_state_resumes_from_every_step",
    ),
    Fault(
        "the stream of a loader with workers is asked for its state",
        "helios/data/external_loader.py",
        "isinstance(loader, DataLoader) or loader.num_workers:",
        "isinstance(loader, DataLoader):",
        f"{FOREIGN}::test_a_stream_with_state_behind_workers_cannot_resume",
    ),
    Fault(
        "a stream is saved as far as it was read ahead",
        "helios/data/external_loader.py",
        "        self._source.hold_state()\n",
        "",
        f"{FOREIGN}::test_a_stream_with_state_goes_on_from_every_batch",
    ),
    Fault(
        "an average has the names of data parallelism",
        "helios/plugins/averaged_weights.py",
        "        bare.of(name): part",
        "        name: part",
        f"{AVERAGES}::test_an_average_goes_on_with_and_without_data_parallelism",
    ),
    Fault(
        "the averages of earlier versions keep the names of data parallelism",
        "helios/plugins/averaged_weights.py",
        "        self._rename(known)\n",
        "",
        f"{AVERAGES}::test_an_average_goes_on_with_and_without_data_parallelism",
    ),
    Fault(
        "another data set class goes on in silence",
        "helios/startup/run_identity.py",
        '*("dataset", "length",',
        '*("length",',
        f"{OTHER_DATA}::test_another_class_of_equal_length_stops_the_run",
    ),
    Fault(
        "what a wrapper wraps does not count as the data set",
        "helios/data/fingerprint.py",
        "        return [dataset.dataset]\n    # In other",
        "        return []\n    # In other",
        f"{OTHER_DATA}::test_another_class_inside_a_subset_stops_the_run",
    ),
    Fault(
        "a data set that has not grown again is not seen",
        "helios/loops/fit.py",
        "            self._check_length()\n",
        "",
        f"{OTHER_DATA}::test_a_data_set_that_has_not_grown_again_stops_the_run",
    ),
    Fault(
        "replicas share a data set of the length that it had at first",
        "helios/data/samplers.py",
        "        if length == self._length:",
        "        if True:",
        f"{OTHER_DATA}::test_a_data_set_that_grows_is_counted_anew_each_epoch",
    ),
    Fault(
        "another fingerprint is not said",
        "helios/startup/run_identity.py",
        "    if before is None or before == now:",
        "    if True:",
        f"{OTHER_DATA}::test_another_fingerprint_warns_and_goes_on",
    ),
    Fault(
        "a run that was finished under a smaller total stays finished",
        "helios/startup/run_identity.py",
        "    if is_limit(reason) and not cursor.stop_reason:",
        "    if False:",
        f"{STAGES}::test_a_mark_that_a_smaller_total_has_left_in_mid_run_does_not_count",
    ),
    Fault(
        "a start with a smaller total marks the run of a larger one",
        "helios/startup/run_saves.py",
        " or self._is_past_its_end(newest):",
        ":",
        f"{STAGES}::test_a_total_that_the_run_has_passed_finishes_nothing",
    ),
    Fault(
        "a file is believed what it says of its tensors' sizes",
        "helios/storage/codec.py",
        "            archive_records.check_sizes(handle)\n",
        "",
        "tests/checkpoint/test_trust.py::test_a_record_that_promises_gigabytes_takes_none",
    ),
    Fault(
        "a reference is read with what the memo held before",
        "helios/storage/container_checks.py",
        "            memo[argument] = top",
        "            memo.setdefault(argument, top)",
        "tests/storage/test_archive_records.py::test_a_reference_that_torch_does_not_write_is_refused",
    ),
    Fault(
        "of two records one is looked at and the other one read",
        "helios/storage/container_checks.py",
        "    if len(records) < len(container.infolist()):",
        "    if not records:",
        "tests/storage/test_archive_records.py::test_two_records_whose_names_differ_in_case_only_are_refused",
    ),
    Fault(
        "a graph is drawn with a warning that nobody can heed",
        "helios/storage/tensorboard_writer.py",
        "(DeprecationWarning, FutureWarning):",
        "(DeprecationWarning,):",
        "tests/storage/test_tensorboard_writer.py"
        "::test_a_graph_is_drawn_without_a_warning_that_its_author_cannot_heed",
    ),
    Fault(
        "a checksum is a plain sum",
        "helios/storage/checksums.py",
        "    return zlib.crc32(whole.reshape(-1).view(np.uint8).data)",
        "    return int(whole.reshape(-1).view(np.uint8).sum())",
        "tests/storage/test_checksums.py"
        "::test_exchanged_elements_and_flipped_signs_change_every_checksum",
    ),
    Fault(
        "a checksum on a device does not weigh words",
        "helios/storage/checksums.py",
        " * _weights(places)",
        "",
        "tests/storage/test_checksums.py"
        "::test_exchanged_elements_and_flipped_signs_change_every_checksum",
    ),
    Fault(
        "a data set declares in vain",
        "helios/startup/state_owners.py",
        "Owner(name, part, unsaved_of(part), is_data=True)",
        "Owner(name, part, is_data=True)",
        "tests/startup/test_owners.py::test_a_data_set_declares_what_need_not_be_saved",
    ),
    Fault(
        "a sampler declares in vain",
        "helios/data/replayed_sampler.py",
        " if name not in unsaved]",
        "]",
        "tests/data/test_replayed_sampler.py"
        "::test_a_generator_that_the_class_of_its_sampler_declares_is_left_out",
    ),
    Fault(
        "the first save names again what the load has named",
        "helios/startup/fit_run.py",
        "            run.model.discovery.note_named(lacking)",
        "            pass",
        f"{LEVELS}::test_what_a_model_loses_is_in_the_sidecar_and_warned_of_at_the_load",
    ),
    Fault(
        "every stage of a finished script warns",
        "helios/startup/run_identity.py",
        "        logging.INFO if is_passed else logging.WARNING,",
        "        logging.WARNING,",
        f"{STAGES}::test_only_the_last_stage_of_a_finished_script_warns_that_nothing_is_to_do",
    ),
    Fault(
        "a commit lists its folder again and again",
        "helios/checkpoint/store.py",
        "file_names.list_checkpoints(self._path)",
        "file_names.find_checkpoints(self._path)",
        "tests/checkpoint/test_store.py::test_a_commit_lists_its_folder_once_at_most",
    ),
    Fault(
        "views of arrays are written by themselves",
        "helios/storage/shared_storages.py",
        "            if arrays and len(group) > 1:",
        "            if False:",
        "tests/state_graph/test_shared_memory.py::test_views_of_one_array_are_views_of_one_array_again",
    ),
    Fault(
        "a training that only loads ends the run",
        "helios/startup/run_saves.py",
        " or self._schedule.chkpt_frequency is None:",
        ":",
        "tests/startup/test_outputs.py::test_a_training_that_only_loads_ends_no_run",
    ),
    Fault(
        "a folder is listed once while a run goes on there",
        "helios/checkpoint/file_names.py",
        "        if found == before:",
        "        if True:",
        "tests/checkpoint/test_vanishing.py::test_a_listing_made_while_a_run_saves_is_made_again",
    ),
    Fault(
        "a resume lists its folder again to load",
        "helios/startup/resume_point.py",
        "Start(folder, folder.load_newest(safe_types, listed=listed))",
        "Start(folder, folder.load_newest(safe_types))",
        "tests/startup/test_resume_point.py"
        "::test_a_resume_lists_its_folder_once_before_the_lock_and_once_under_it",
    ),
    Fault(
        "one listing that holds nothing makes a new run",
        "helios/startup/resume_point.py",
        "file_names.list_checkpoints(folder.path) or None",
        "file_names.list_checkpoints(folder.path)",
        "tests/startup/test_resume_point.py"
        "::test_a_listing_that_has_missed_everything_is_made_again",
    ),
    Fault(
        "the trainer limits no batches",
        "helios/startup/trainer_options.py",
        "if phase in self.batch_limits else []",
        "if False else []",
        "tests/plugins/test_quick_trials.py::test_the_trainer_limits_passes_without_a_plugin",
    ),
    Fault(
        "the trainer tries no validation",
        "helios/startup/fit_run.py",
        "            trial_steps=run.options.sanity_steps,\n",
        "",
        "tests/plugins/test_quick_trials.py::test_the_trainer_asks_for_a_trial_like_a_plugin",
    ),
    Fault(
        "the file of the command is deleted",
        "helios/startup/resume_point.py",
        "        folder.protect(Path(start.origin))",
        "        pass",
        "tests/integration/test_which_run.py"
        "::test_the_file_that_the_command_names_outlives_every_start",
    ),
    Fault(
        "two trainings in one process",
        "helios/startup/trainer_call.py",
        "setdefault(pid, own) is not own:",
        "setdefault(pid, own) is None:",
        f"{TWO_RUNS}::test_a_call_of_another_trainer_inside_of_a_fit_leaves_that_fit_as_it_was",
    ),
    Fault(
        "retention takes the files of others",
        "helios/checkpoint/store.py",
        "own = [entry for entry in self.entries() if file_names.belongs_to(entry.path, run_name)]",
        "own = self.entries()",
        "tests/checkpoint/test_retention.py::test_files_of_others_are_neither_deleted_nor_counted",
    ),
    Fault(
        "nobody looks whether all processes see the folder",
        "helios/startup/resume_point.py",
        "if team.rank != 0 and not lock.is_shown(token)",
        "if team.rank == 0 and not token",
        f"{TWO_RUNS}::test_a_folder_that_one_rank_does_not_see_ends_the_run_before_it_begins",
    ),
    Fault(
        "an interruption cuts the wait for a save short",
        "helios/checkpoint/writer_thread.py",
        "        self._is_idle.wait()\n",
        "",
        "tests/checkpoint/test_checkpoint_writer.py"
        "::test_an_interruption_while_a_save_is_awaited_does_not_cut_it_short",
    ),
    Fault(
        "a sidecar holds the scores of other weights",
        "helios/startup/run_saves.py",
        "as_numbers(self._model.metrics) if record.has_validated else {}",
        "as_numbers(self._model.metrics)",
        "tests/startup/test_outputs.py::test_a_sidecar_holds_scores_of_its_own_weights_only",
    ),
    Fault(
        "what a process had of its own no longer shares memory",
        "helios/distributed/pickling.py",
        "        if place not in self._memories:",
        "        if True:",
        "tests/distributed/test_own_parts.py"
        "::test_as_many_processes_go_on_each_with_its_own[counting]",
    ),
    Fault(
        "a worker outlives a training that was killed while it started",
        "helios/data/workers.py",
        "        _end_without_parent()\n        ignore",
        "        ignore",
        "tests/data/test_loader.py"
        "::test_a_worker_whose_training_was_killed_while_it_started_ends_by_itself",
    ),
    Fault(
        "groups stay in the order of setup",
        "helios/state_graph/optimizers.py",
        "    groups[:] = [group for group in chosen if group is not None]",
        "    pass",
        f"{OPTIMIZERS}::test_an_optimizer_gets_the_order_that_was_saved[_groups]",
    ),
    Fault(
        "what setup gave an optimizer is not known after a change",
        "helios/state_graph/optimizers.py",
        '        built = state["built"].get(path, saved) if has_names else now',
        "        built = saved if has_names else now",
        f"{OPTIMIZERS}::test_what_training_puts_into_other_groups_is_resumed",
    ),
    Fault(
        "an optimizer of other parameters is taken",
        "helios/state_graph/optimizers.py",
        "        _refuse(path, optimizer, known[1], tensors)",
        "        pass",
        f"{OPTIMIZERS}::test_an_optimizer_of_other_parameters_is_refused_by_name",
    ),
    Fault(
        "functions of groups are given to other groups",
        "helios/state_graph/optimizers.py",
        "        _check_functions(path, part, plans[path], found)",
        "        pass",
        f"{OPTIMIZERS}::test_a_function_for_each_group_holds_the_groups_in_their_order",
    ),
    Fault(
        "a scheduler may move another optimizer after a resume",
        "helios/state_graph/optimizers.py",
        "        if now[path] != saved[path]:",
        "        if False:",
        f"{OPTIMIZERS}::test_a_scheduler_of_another_optimizer_is_refused",
    ),
    Fault(
        "a network that was rebuilt is saved",
        "helios/checkpoint/capture.py",
        "    _refuse_misfits(misfits)\n",
        "    pass\n",
        "tests/integration/test_forms.py::"
        "test_what_no_resume_can_make_again_is_refused_at_the_save",
    ),
    Fault(
        "each look at a network walks it anew",
        "helios/state_graph/network_parts.py",
        "        if known is None:",
        "        if True:",
        "tests/state_graph/test_network_parts.py::"
        "test_a_capture_walks_a_network_once_for_each_thing_that_torch_lists",
    ),
    Fault(
        "a shared parameter has one name",
        "helios/state_graph/module_state.py",
        "module.named_parameters(remove_duplicate=False):",
        "module.named_parameters():",
        f"{OPTIMIZERS}::test_a_shared_parameter_is_found_under_each_of_its_names",
    ),
    Fault(
        "a quiet boundary sleeps over what is due",
        "helios/schedule.py",
        "(done - done % frequency + frequency for",
        "(done + 2 * frequency for",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "a loop that redefines its cycle advances once",
        "helios/loops/loop.py",
        "(getattr(kind, name) is method for",
        "(True for",
        "tests/loops/test_loop.py",
    ),
    Fault(
        "a method that is put on a loop is not called",
        "helios/loops/loop.py",
        "            and not self._is_redefined()\n",
        "",
        "tests/loops/test_loop.py::test_a_method_of_the_cycle_that_is_put_in_later_is_called",
    ),
    Fault(
        "a data set of the user's is not seeded before the fetch",
        "helios/data/loader.py",
        "            type(dataset) is TensorDataset\n",
        "            True or type(dataset) is TensorDataset\n",
        "tests/data/test_source.py",
    ),
    Fault(
        "an event that somebody hears counts as unheard",
        "helios/hooks/bus.py",
        "self._receivers.items() if found}",
        "self._receivers.items() if found[1:]}",
        "tests/integration/test_event_logs.py",
    ),
    Fault(
        "an epoch's start is told again after a resume",
        "helios/hooks/live_run.py",
        "        return self.is_resumed and is_numbered and self.cursor.batch > 0",
        "        return False and is_numbered",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "event files are not cut back",
        "helios/startup/run_log.py",
        "            marks=record.events if is_training else None,",
        "            marks=None,",
        "tests/integration/test_logs.py",
    ),
    Fault(
        "plugins hear events after the model",
        "helios/hooks/events.py",
        'pme, pm, state = (P, M, E), (P, M), ("state",)',
        'pme, pm, state = (M, P, E), (M, P), ("state",)',
        "tests/hooks/test_events.py::"
        "test_plugins_come_first_monitors_right_after_the_model_and_the_engine_last",
    ),
    Fault(
        "monitors come before the model",
        "helios/hooks/events.py",
        "(P, M, MONITOR, E) if is_validation else pme",
        "(P, MONITOR, M, E) if is_validation else pme",
        "tests/hooks/test_bus.py::"
        "test_a_monitor_hears_the_end_of_a_validation_after_the_model_and_its_start_before",
    ),
    Fault(
        "the end of a forward pass is not told",
        "helios/loops/step.py",
        '    session.hooks.emit("on_forward_end", session.context)',
        "    pass",
        f"{CHANNELS}::test_channels_nest_in_a_training[by steps]",
    ),
    Fault(
        "on_training_resume is not told",
        "helios/loops/fit.py",
        '            session.hooks.emit("on_training_resume", session.state)\n',
        "",
        "tests/integration/test_event_logs.py::"
        "test_a_run_tells_what_was_written_down_by_hand[exception_after_resume]",
    ),
    Fault(
        "a period as long as the run does not look like one of epochs",
        "helios/model/schedulers.py",
        "if found and max(found) <= num_epochs < math.inf",
        "if found and max(found) < num_epochs < math.inf",
        "tests/model/test_schedulers.py::"
        "test_a_period_that_fits_into_the_epochs_looks_like_one_of_epochs",
    ),
    Fault(
        "the banner says nothing of a scheduler of epochs",
        "helios/startup/run_log.py",
        "    if not schedule.is_by_epoch:",
        "    if schedule.is_by_epoch:",
        "tests/startup/test_banner.py::"
        "test_the_banner_names_a_scheduler_that_seems_to_count_epochs",
    ),
    Fault(
        "the site leaves out the public names of a package",
        "scripts/site/pages.py",
        '    "core": ("Utilities", (), ("helios.core",)),',
        '    "core": ("Utilities", (), ("helios.data",)),',
        "tests/test_site.py::test_every_public_name_is_on_one_api_page",
    ),
    Fault(
        "the site shows an argument without a description",
        "helios/trainer.py",
        "        clip_value: maximum magnitude",
        "        clipping: maximum magnitude",
        "tests/test_site.py::test_the_docstring_describes_every_argument",
    ),
    Fault(
        "the site has no link from a source to its API",
        "scripts/site/pages.py",
        "    return _AT_THE_TOP.get(target) or api.get(target) or",
        "    return _AT_THE_TOP.get(target) or",
        "tests/test_site.py::"
        "test_a_source_with_public_names_leads_to_the_api_and_any_other_to_its_text",
    ),
    Fault(
        "running losses are added in place",
        "helios/core/loss_means.py",
        "table[name] = table[name] + part if",
        "table[name] = table[name].add_(part) if",
        "tests/model/test_model.py::test_a_running_loss_that_was_kept_stays_what_it_was",
    ),
    Fault(
        "the view of a session lacks what the page on loops names",
        "helios/loops/view.py",
        "    def agree(self)",
        "    def _agree(self)",
        "tests/loops/test_view.py::test_the_view_has_exactly_the_members_that_the_page_names",
    ),
    Fault(
        "a new child loop does not adopt its predecessor's children",
        "helios/loops/loop.py",
        "                loop._adopt(present)",
        "                pass",
        "tests/loops/test_loop.py::test_a_new_child_keeps_the_children_of_the_old_one",
    ),
    Fault(
        "a skipped step repeats what was due at its count",
        "helios/schedule.py",
        "return state.is_step_committed and _is_multiple(",
        "return _is_multiple(",
        "tests/plugins/test_nan_guard.py::test_what_was_due_is_not_done_again_after_a_skipped_step",
    ),
    Fault(
        "YieldLoop lets gradients of one loss into all networks",
        "helios/loops/yielding.py",
        "            self.backward(loss, self._turns[path])",
        "            self.backward(loss)",
        f"{YIELDS}::test_a_window_sums_each_optimizers_gradients_and_averages_them_apart",
    ),
    Fault(
        "a window's count is reset after the first optimizer",
        "helios/loops/yielding.py",
        "                    is_committed |= self._update_now(path, optimizer)\n",
        "                    is_committed |= self._update_now(path, optimizer)\n"
        "                    engine.close_window()\n",
        f"{YIELDS}::test_a_window_sums_each_optimizers_gradients_and_averages_them_apart",
    ),
    Fault(
        "an interruption is noted as finished",
        "helios/startup/fit_run.py",
        "        self._saves.finish(None if is_interrupted else reason)",
        '        self._saves.finish(reason or "interrupted")',
        f"{CHANNELS}::test_an_interruption_leaves_all_scopes_and_a_restart_enters_them_again",
    ),
    Fault(
        "an interrupted run tells on_training_epoch_end",
        "helios/loops/epoch.py",
        "        if self._is_left_unfinished:",
        "        if False:",
        "tests/plugins/test_time_limit.py::test_the_ways_out_are_told_and_the_ends_are_not",
    ),
    Fault(
        "a context that was entered is not left after an exception",
        "helios/plugins/channels.py",
        "            self._scopes.unwind(exception=exception)",
        "            self._scopes = Scopes()",
        "tests/plugins/test_channels.py::"
        "test_after_an_exception_every_exit_sees_it_innermost_scope_first",
    ),
    Fault(
        "the exits of contexts run in reverse",
        "helios/plugins/contexts.py",
        "    for hook in hooks:\n        try:",
        "    for hook in reversed(list(hooks)):\n        try:",
        "tests/plugins/test_channels.py::"
        "test_contexts_are_left_in_the_order_in_which_they_are_entered",
    ),
    Fault(
        "a second owner of a batch is accepted",
        "helios/hooks/bus.py",
        "            if len(owners) > 1:",
        "            if False:",
        "tests/hooks/test_bus.py::test_a_second_owner_of_a_batch_is_an_error_that_names_both",
    ),
    Fault(
        "a limit on batches is not compared at a resume",
        "helios/startup/run_identity.py",
        '*("limit_batches", "is_distributed")',
        '*("is_distributed",)',
        "tests/plugins/test_quick_trials.py::"
        "test_a_changed_limit_stops_a_resume_and_the_epoch_goes_on_where_it_stood_if_allowed",
    ),
    Fault(
        "a trial validation leaves its scores",
        "helios/loops/fit.py",
        "[session.model, session.engine, *plugins",
        "[session.engine, *plugins",
        "tests/plugins/test_metrics.py::test_a_trial_validation_leaves_nothing_behind",
    ),
    Fault(
        "the NaN guard names the samples of a later batch",
        "helios/hooks/context.py",
        "        return dataclasses.replace(self._run.cursor)",
        "        return self._run.cursor",
        "tests/plugins/test_nan_guard.py::"
        "test_a_window_over_the_end_of_an_epoch_names_batches_of_both",
    ),
    Fault(
        "early stopping counts what is no validation of a training",
        "helios/plugins/early_stopping.py",
        "        if not self._is_training:\n            return",
        "        if False:\n            return",
        "tests/plugins/test_early_stopping.py::"
        "test_trial_validations_and_those_outside_of_fit_do_not_count",
    ),
    Fault(
        "gradients leave though a hook looks at them",
        "helios/requests.py",
        "self.keeps_losses, self.frees_gradients = not changes_losses, not looks",
        "self.keeps_losses, self.frees_gradients = not changes_losses, True",
        f"{BUCKETS}::test_gradients_stay_where_somebody_looks_at_them",
    ),
    Fault(
        "losses are told before hooks may change them",
        "helios/requests.py",
        "self.keeps_losses, self.frees_gradients = not changes_losses, not looks",
        "self.keeps_losses, self.frees_gradients = True, not looks",
        f"{EXCHANGES}::test_losses_that_a_hook_puts_there_are_in_the_means",
    ),
    Fault(
        "loops of users are not asked",
        "helios/requests.py",
        "(self._is_doubted or not asking.isdisjoint(events) for events in late)",
        "(not asking.isdisjoint(events) for events in late)",
        f"{EXCHANGES}::test_what_the_code_of_users_asks_for_counts_at_the_next_boundary",
    ),
    Fault(
        "a loop that is connected in mid-run is not asked",
        "helios/requests.py",
        "        if is_doubted:",
        "        if False:",
        f"{EXCHANGES}::test_what_the_code_of_users_asks_for_counts_at_the_next_boundary",
    ),
    Fault(
        "a request behind the gradients waits in silence",
        "helios/requests.py",
        "        if self._thread == threading.get_ident():",
        "        if False:",
        f"{EXCHANGES}::test_what_nobody_expects_to_ask_is_refused",
    ),
    Fault(
        "a skip is told before the hook that may ask for it",
        "helios/requests.py",
        "        if known is None or self._skips_late:",
        "        if known is None:",
        "tests/integration/test_decisions.py::test_what_follows_a_decision_is_in_the_golden_file",
    ),
    Fault(
        "requests behind the gradients wait for the next window",
        "helios/requests.py",
        "        if self._asks_late:\n            return",
        "        if False:\n            return",
        "tests/integration/test_decisions.py::test_what_follows_a_decision_is_in_the_golden_file",
    ),
    Fault(
        "orders of optimizers are not compared over processes",
        "helios/state_graph/consistency.py",
        "        _compare_orders(rank, found[0], first[0])",
        "        pass",
        "tests/distributed/test_orders.py"
        "::test_an_order_of_each_process_is_refused_before_the_first_step",
    ),
    Fault(
        "tensors of no network are not compared over processes",
        "helios/state_graph/consistency.py",
        "    tensors = dict(loose)",
        "    tensors = dict[str, Tensor]()",
        "tests/distributed/test_orders.py"
        "::test_tensors_of_no_network_that_differ_are_refused_before_the_first_step",
    ),
    Fault(
        "what is asked for behind a safe point counts at once",
        "helios/hooks/live_run.py",
        "        agreed = self.agreement.agreed",
        "        agreed = self.agreement.asked",
        f"{ELASTIC}::test_what_is_asked_for_behind_a_safe_point_waits_for_the_next",
    ),
    Fault(
        "only the first turn is watched",
        "helios/state_graph/consistency.py",
        "        if self._has_reported and iteration & (iteration - 1):\n            return None",
        "        if self._has_reported:\n            return None",
        "tests/loops/test_replicas.py",
    ),
    Fault(
        "objects that nobody can copy are written later",
        "helios/storage/codec.py",
        "        return Captured(code, is_own=False)",
        "        pass",
        f"{SAVER}::test_objects_that_nobody_can_copy_are_written_before_the_call_returns",
    ),
    Fault(
        "the next save does not wait for the one in flight",
        "helios/checkpoint/checkpoint_writer.py",
        "        self._thread.wait()\n        self._raise_own_failure()\n        committed",
        "        self._raise_own_failure()\n        committed",
        "tests/integration/test_saves_in_flight.py::test_the_next_save_waits_for_the_one_in_flight",
    ),
    Fault(
        "an error of fit leaves a save in flight",
        "helios/startup/fit_run.py",
        "        run.settings.callback(saves.writer.close)\n",
        "",
        "tests/integration/test_saves_in_flight.py::"
        "test_an_error_that_passes_through_unlogged_waits_for_the_save_too",
    ),
    Fault(
        "a refused save is not raised at the end",
        "helios/checkpoint/checkpoint_writer.py",
        "        if self._refused is not None:",
        "        if False:",
        f"{SAVER}::test_a_refused_last_save_is_raised_at_the_end",
    ),
    Fault(
        "a later save does not heal a refused one",
        "helios/checkpoint/checkpoint_writer.py",
        "            self.newest = pending.path\n            self._refused = None",
        "            self.newest = pending.path",
        f"{SAVER}::test_a_disk_that_refuses_a_save_is_told_of_and_the_next_save_heals_it",
    ),
    Fault(
        "too little memory for a copy costs the save",
        "helios/checkpoint/writer_thread.py",
        "            except MemoryError as error:\n"
        "                self._do_without_copies(error)\n        return make",
        "            except ZeroDivisionError as error:\n"
        "                self._do_without_copies(error)\n        return make",
        f"{SAVER}::test_a_copy_that_fails_in_the_middle_costs_no_save",
    ),
    Fault(
        "a folder that was deleted is not locked again",
        "helios/startup/run_saves.py",
        "            start.lock.renew()",
        "            pass",
        f"{TWO_RUNS}::test_a_folder_deleted_in_the_run_is_locked_again_with_the_next_save",
    ),
    Fault(
        "the failure of a save stays on rank 0",
        "helios/requests.py",
        "agreed.interruption or interruption\n        return is_alarm",
        "agreed.interruption or interruption\n        return False",
        "tests/distributed/test_save_faults.py::"
        "test_all_ranks_end_with_the_same_error_at_the_next_safe_point[async-EIO]",
    ),
    Fault(
        "what is half written stays",
        "helios/checkpoint/store.py",
        "                files.unlink(unfinished, missing_ok=True)\n                if not",
        "                if not",
        f"{SAVE_FAULTS}::test_each_operation_of_a_save_may_go_wrong_in_one_way",
    ),
    Fault(
        "a deletion that fails ends the save",
        "helios/checkpoint/store.py",
        '                _LOGGER.warning("The old checkpoint %s was not deleted: %s.", '
        "entry.path, error)",
        "                raise error",
        f"{SAVE_FAULTS}::test_each_operation_of_a_save_may_go_wrong_in_one_way",
    ),
    Fault(
        "an end that cannot be noted is an error",
        "helios/startup/run_saves.py",
        "            except OSError as error:\n                _LOGGER.error(\n"
        '                    "Could not mark',
        "            except ZeroDivisionError as error:\n                _LOGGER.error(\n"
        '                    "Could not mark',
        f"{SAVE_FAULTS}::test_each_operation_of_a_save_may_go_wrong_in_one_way",
    ),
    Fault(
        "mapped tensors are kept",
        "helios/checkpoint/capture.py",
        "    return dataclasses.replace(record, **copy.deepcopy(parts))",
        "    return record",
        "tests/startup/test_mapped.py",
    ),
    Fault(
        "the size of checkpoints is not estimated",
        "helios/startup/run_saves.py",
        "            num_bytes=sum(sizes) + discovery.values.num_bytes,",
        "            num_bytes=0,",
        "tests/startup/test_outputs.py",
    ),
    Fault(
        "what cannot be judged is deleted",
        "helios/checkpoint/retention.py",
        "        kept |= {entry.path for entry in ranked if not entry.is_known}",
        "        pass",
        "tests/checkpoint/test_retention.py::"
        "test_what_cannot_be_judged_stays_unless_names_decide_alone",
    ),
    Fault(
        "the last good one is deleted",
        "helios/checkpoint/retention.py",
        "for entry in known[-1:]}",
        "for entry in known[-1:] if False}",
        "tests/checkpoint/test_retention.py::"
        "test_the_newest_that_is_known_stays_beside_a_newer_one_that_is_not",
    ),
    Fault(
        "workers inherit the lock",
        "helios/storage/folder_lock.py",
        "fcntl.lockf(",
        "fcntl.flock(",
        f"{TWO_RUNS}::test_a_kill_frees_the_folder_while_the_workers_live_on",
    ),
    Fault(
        "a worker minds signals",
        "helios/data/workers.py",
        "        ignore_signals(self._ignored or noted_signals())",
        "        noted_signals()",
        f"{SIGNALS}::test_workers_do_not_mind_what_is_sent_to_all_processes_of_a_job",
    ),
    Fault(
        "a digest that differs is good to the tools",
        "helios/checkpoint/loading.py",
        "        is_verified = self._contents.compare_bytes(self.sidecar, self._share)",
        "        is_verified = True",
        f"{COMMANDS}::test_verify_says_good_or_why_not_and_its_code_too",
    ),
    Fault(
        "inspect reads the tensors",
        "helios/storage/codec.py",
        "weights_only=True, mmap=True)",
        "weights_only=True, mmap=False)",
        "tests/checkpoint/test_status.py::"
        "test_the_structure_of_a_large_file_is_read_without_its_tensors",
    ),
    Fault(
        "export takes what is damaged",
        "helios/cli/conversions.py",
        "    if not status.is_good:",
        "    if tree is None:",
        f"{COMMANDS}::"
        "test_every_kind_of_file_ends_in_a_code_and_a_message_with_its_name"
        "[export to pt-a flipped bit]",
    ),
    Fault(
        "a folder that also holds other files is replaced by an export",
        "helios/checkpoint/export_folders.py",
        "    if others:",
        "    if not names:",
        f"{EXPORTS}::test_nothing_but_an_export_is_ever_replaced",
    ),
    Fault(
        "a kill while an old export is removed leaves what nobody knows",
        "helios/checkpoint/export_folders.py",
        "        if each.name != NOTE_NAME:",
        "        if each.name:",
        "tests/checkpoint/test_export_kills.py",
    ),
    Fault(
        "an export to transformers reads all tensors at once",
        "helios/checkpoint/export_folders.py",
        "            write(folder / file, weights.read(group))",
        "            write(folder / file, {k: v for k, v in weights.read().items() if k in group})",
        f"{EXPORTS}::test_memory_is_needed_for_one_file_or_one_tensor",
    ),
    Fault(
        "an export for torch.distributed.checkpoint keeps all tensors",
        "helios/storage/dcp_folder.py",
        "single_file_per_rank=False",
        "single_file_per_rank=True",
        f"{EXPORTS}::test_memory_is_needed_for_one_file_or_one_tensor",
    ),
    Fault(
        "an export has averages in their own types",
        "helios/checkpoint/export.py",
        "    if tensor.dtype == dtype:\n        return tensor",
        "    if tensor.dtype:\n        return tensor",
        f"{EXPORTS}::test_an_average_is_exported_in_the_types_of_the_weights",
    ),
    Fault(
        "a migrated run stands at sample 0",
        "helios/startup/run_identity.py",
        "sample=cursor.batch * size * replicas.num_replicas)",
        "sample=0)",
        f"{MIGRATED_RUNS}::test_the_epoch_under_way_goes_on_at_its_next_sample",
    ),
    Fault(
        "a file that was put back is damaged",
        "helios/checkpoint/contents.py",
        "                if found == sidecar.extra.get(file_names.SOURCE_DIGEST):",
        "                if False:",
        f"{MIGRATIONS}::test_an_old_file_that_was_put_back_is_unmigrated_and_not_damaged",
    ),
    Fault(
        "a start that is refused has cut event files back",
        "helios/startup/run_log.py",
        "            cuts=False,\n",
        "            cuts=True,\n",
        f"{REWINDS}::test_a_start_that_is_refused_late_cuts_no_events",
    ),
    Fault(
        "variables with a key are no secrets of a command",
        "helios/ledger/scrubbing.py",
        "(?:KEY|TOKEN|SECRET|PASSWORD))",
        "(?:TOKEN|SECRET|PASSWORD))",
        "tests/ledger/test_scrubbing.py::test_a_secret_word_of_a_command_is_hidden",
    ),
    Fault(
        "several processes begin with lazy layers",
        "helios/state_graph/consistency.py",
        "    refuse_lazy_layers(discovery)\n",
        "",
        "tests/loops/test_replicas.py"
        "::test_layers_that_get_their_weights_in_the_first_step_are_refused",
    ),
    Fault(
        "a strict start accepts another program",
        "helios/startup/run_manifest.py",
        "        if changes:\n            topics",
        "        if False:\n            topics",
        "tests/ledger/test_starts.py::test_a_strict_start_refuses_what_may_change_the_training",
    ),
    Fault(
        "a start that was refused is written into the manifest",
        "helios/startup/run_manifest.py",
        "        if self._start:\n",
        "        if True:\n",
        "tests/ledger/test_starts.py::test_a_strict_start_refuses_what_may_change_the_training",
    ),
    Fault(
        "a comment is another program",
        "helios/ledger/source_files.py",
        "                node.body = node.body[1:]\n",
        "                pass\n",
        "tests/ledger/test_manifest.py::test_comments_and_docstrings_change_the_text_only",
    ),
    Fault(
        "a patch is written with its secrets",
        "helios/ledger/source_files.py",
        "    text = scrub(patch.decode(",
        "    text = str(patch.decode(",
        "tests/ledger/test_manifest.py::test_what_is_not_committed_is_in_the_patch_without_secrets",
    ),
    Fault(
        "a manifest forgets what was removed",
        "helios/ledger/manifest_file.py",
        "{name: None for name in before if name not in after}",
        "{}",
        "tests/ledger/test_manifest.py::test_a_patch_makes_the_second_of_the_first",
    ),
    Fault(
        "an event follows a line that was cut off without a new line",
        "helios/ledger/lineage.py",
        'data = data if handle.read(1) == b"\\n" else',
        "data = data if True else",
        "tests/ledger/test_lineage.py::test_a_line_that_a_kill_has_cut_off_costs_only_itself",
    ),
    Fault(
        "what is left of a write that failed is not overwritten",
        "helios/ledger/book.py",
        "            handle.seek(place)\n",
        "",
        "tests/ledger/test_book.py::test_lines_that_the_disk_refuses_wait_in_order",
    ),
    Fault(
        "a full ledger has the gradients after clipping",
        "helios/loops/optimizer.py",
        "            hear(optimizer)\n",
        "            pass\n",
        "tests/ledger/test_full.py::test_clipping_changes_what_follows_the_gradients",
    ),
    Fault(
        "a resume changes what a ledger holds",
        "helios/startup/run_evidence.py",
        "    return found\n\n\ndef _read_generators",
        "    return asked\n\n\ndef _read_generators",
        "tests/ledger/test_full.py::test_a_ledger_keeps_its_level",
    ),
    Fault(
        "optimizers are watched after the end of a run",
        "helios/ledger/tensor_digests.py",
        "            self._hook.remove()\n",
        "",
        "tests/ledger/test_full.py::test_no_hook_of_optimizers_is_left_after_a_run_that_fails",
    ),
    Fault(
        "the order of a dictionary enters a full ledger",
        "helios/ledger/tensor_digests.py",
        "        return sorted(named, key=lambda pair: pair[0])\n",
        "        return named\n",
        "tests/ledger/test_tensor_digests.py::test_one_value_changes_the_digest_of_its_tensor_only",
    ),
    Fault(
        "a full ledger lacks the batches of other processes",
        "helios/ledger/tensor_digests.py",
        "self._exchanged = self._gather(self._turns)",
        "self._exchanged = self._turns",
        "tests/distributed/test_elastic.py"
        "::test_each_start_may_have_another_number_of_processes[iteration-order0]",
    ),
    Fault(
        "a full ledger is not compared with an ordinary one",
        "helios/ledger/differences.py",
        "        left, right = map(_without_tensors, left), map(_without_tensors, right)\n",
        "        pass\n",
        "tests/ledger/test_full.py"
        "::test_a_full_ledger_changes_no_bit_and_holds_the_lines_of_the_other",
    ),
    Fault(
        "an interrupted run writes the line of its end",
        "helios/loops/fit.py",
        "        if not session.is_interrupted:\n            for hear",
        "        if True:\n            for hear",
        "tests/ledger/test_runs.py::test_an_interrupted_run_has_no_end_until_it_has_ended",
    ),
    Fault(
        "a number of an accelerator is not copied before it changes",
        "helios/ledger/writer.py",
        "non_blocking=number.is_cuda, copy=True",
        "non_blocking=number.is_cuda",
        "tests/ledger/test_writer.py::test_numbers_of_an_accelerator_are_read_late_and_as_they_were",
    ),
    Fault(
        "a ledger rounds mean losses to float32",
        "helios/loops/epoch.py",
        "hear(session.turns.means or session.model.loss_items)",
        "hear(session.model.loss_items)",
        "tests/ledger/test_runs.py::test_losses_are_means_in_float64",
    ),
    Fault(
        "batches of workers are read in the training process",
        "helios/data/keyed.py",
        "        if not self._dataset.reads_content:",
        "        if True:",
        "tests/ledger/test_runs.py::test_workers_read_the_batches",
    ),
    Fault(
        "a user's own loop gets what a worker has read",
        "helios/data/keyed.py",
        "        if not self._dataset.reads_content:",
        "        if False:",
        "tests/data/test_source.py::test_only_a_run_that_asks_gets_what_was_read",
    ),
    Fault(
        "a flat batch of tensors is hashed without its elements",
        "helios/storage/content_hash.py",
        "crc32(each.numpy())) for each in members",
        "0) for each in members",
        "tests/storage/test_content_hash.py::test_a_fingerprint_stays_what_it_is_in_ledgers",
    ),
    Fault(
        "a line depends on whether processes have exchanged hashes",
        "helios/ledger/writer.py",
        "            num_unseen += each.num_unseen\n",
        "            num_unseen = each.num_unseen\n",
        "tests/ledger/test_writer.py::"
        "test_a_line_does_not_follow_from_whether_processes_have_exchanged_it",
    ),
    Fault(
        "evidence is gathered during the first iteration",
        "helios/startup/run_manifest.py",
        "        while not self._has_stepped() and not self._hurries.wait(_PAUSE):",
        "        while False:",
        "tests/ledger/test_starts.py::test_the_first_iteration_waits_for_no_evidence",
    ),
    Fault(
        "rates of an optimizer that was replaced are written",
        "helios/ledger/writer.py",
        "            is_same = is_same and attributes.get(name) is holder",
        "            pass",
        "tests/ledger/test_writer.py::test_an_optimizer_that_is_replaced_is_found_in_the_next_line",
    ),
    Fault(
        "the worker's batches have no indices",
        "helios/data/keyed_source.py",
        "for _ in self.indices]\n        except",
        "for _ in [self.indices, setattr(self, 'indices', None)][0]]\n        except",
        "tests/ledger/test_runs.py::test_what_changes_no_bit_changes_no_line",
    ),
    Fault(
        "a checkpoint of another ledger is good",
        "helios/ledger/verification.py",
        "        places.discard((size, reader.chain, reader.tail))",
        "        places.clear()",
        "tests/ledger/test_verification.py::test_a_checkpoint_of_another_ledger_is_named",
    ),
    Fault(
        "each iteration has a line of times",
        "helios/ledger/timing.py",
        "_SECONDS, _SHARE = 1.0, 100",
        "_SECONDS, _SHARE = 0.0, 200_000",
        "tests/ledger/test_timing.py::test_a_million_iterations_stay_below_two_megabytes",
    ),
    Fault(
        "scores that are repeated after a kill count twice",
        "helios/ledger/timing.py",
        '    found.scores = [each for each in found.scores if each["iteration"] <= iteration]\n',
        "",
        "tests/ledger/test_timing.py::test_repeated_iterations_count_once_but_their_time_does",
    ),
    Fault(
        "distances of numbers of opposite signs are wrong",
        "helios/checkpoint/comparison.py",
        "    return np.where(bits & sign, ~bits, bits | sign)",
        "    return bits",
        "tests/checkpoint/test_comparison.py",
    ),
    Fault(
        "a rewind leaves gaps in accumulation windows",
        "helios/loops/epoch.py",
        "            batch=session.cursor.batch - session.num_skipped_batches,",
        "            batch=session.cursor.batch,",
        f"{REWINDS}::test_a_rewound_run_has_the_bits_of_one_that_never_had_the_batches",
    ),
    Fault(
        "a rewind leaves the length of an epoch as it was",
        "helios/data/source.py",
        "total - self.count_skipped(epoch, total), done",
        "total, done",
        "tests/data/test_skipped.py::test_a_pass_is_measured_without_skipped_batches",
    ),
    Fault(
        "a rewind is not in later checkpoints",
        "helios/startup/run_saves.py",
        '            "rewinds": [each.as_plain() for each in start.rewinds],\n',
        "",
        f"{REWINDS}::test_a_rewound_run_resumes_from_each_of_its_checkpoints",
    ),
    Fault(
        "a rewind is written down after it has moved files",
        "helios/startup/rewinding.py",
        "    for plan in plans:\n        _move_later(folder, plan)\n",
        "    write_plans(folder.path, known)\n    for plan in plans:\n"
        "        _move_later(folder, plan)\n    write_plans(folder.path, known + added)\n",
        f"{REWINDS}::test_a_kill_at_any_file_operation_of_a_rewind_costs_nothing",
    ),
    Fault(
        "a rewind moves checkpoints before their sidecars",
        "helios/startup/rewinding.py",
        "        for path in (entry.sidecar_path, entry.path):",
        "        for path in (entry.path, entry.sidecar_path):",
        f"{REWINDS}::test_a_kill_at_any_file_operation_of_a_rewind_costs_nothing",
    ),
    Fault(
        "a later rewind brings skipped batches back",
        "helios/startup/rewinding.py",
        "        return Course(loaded, [*rewinds, plan.rewind], [plan])",
        "        return Course(loaded, [plan.rewind], [plan])",
        f"{REWINDS}::test_a_later_rewind_keeps_what_an_earlier_one_skips",
    ),
    Fault(
        "a replay opens the logs of its run",
        "helios/startup/fit_run.py",
        "        if self._make_evidence is None:\n            # Logs",
        "        if True:\n            # Logs",
        "tests/ledger/test_replay.py::test_a_replay_writes_nothing",
    ),
    Fault(
        "a logger of rows writes in a replay",
        "helios/plugins/row_loggers.py",
        " and not self.context.is_replay",
        "",
        "tests/ledger/test_replay.py::test_a_replay_writes_nothing",
    ),
    Fault(
        "a replay from the beginning has the threads of the process",
        "helios/startup/replay_run.py",
        "known=None if start.loaded else _load_witness(stretch, types)",
        "known=None",
        "tests/ledger/test_replay.py::test_the_run_decides_the_number_of_threads",
    ),
    Fault(
        "a replay does not end at its last iteration",
        "helios/startup/replay_run.py",
        "        if is_done and not stretch.meets_end:",
        "        if False:",
        "tests/ledger/test_replay.py::test_a_replay_ends_at_its_stop_or_with_its_window",
    ),
    Fault(
        "a replay announces a save twice",
        "helios/checkpoint/checkpoint_writer.py",
        "        return self._announced == (state.global_epoch, state.global_iteration)",
        "        return False",
        "tests/ledger/test_replay.py::test_a_save_that_two_events_ask_for_is_one",
    ),
    Fault(
        "a replay takes any level",
        "helios/startup/replay_start.py",
        "    if level.height < Level.RESTART.height:",
        "    if False:",
        "tests/ledger/test_replay.py::test_below_restart_a_replay_is_refused",
    ),
    Fault(
        "the end of a replay is not compared",
        "helios/ledger/differences.py",
        "        if self.is_over or (is_past and not is_end and not self._meets_end):",
        "        if self.is_over or is_past:",
        "tests/ledger/test_replay.py::test_weights_that_differ_at_the_end_only_are_found",
    ),
    Fault(
        "one that died between the groups ends the others with an error of PyTorch",
        "helios/distributed/process_groups.py",
        "        yield\n    except RuntimeError as error:\n        # Not",
        "        yield\n    except KeyError as error:\n        # Not",
        "tests/distributed/test_collectives.py::test_a_rank_that_dies_while_the_groups_are_made_is_not_awaited_for_hours",
    ),
    Fault(
        "control messages get the short timeout of the meeting",
        "helios/distributed/process_groups.py",
        "    set_timeout(CONTROL_TIMEOUT, control)",
        "    pass",
        "tests/distributed/test_collectives.py::test_messages_of_control_may_take_longer_than_the_meeting",
    ),
    Fault(
        "a task takes one that has given up before for one that has failed",
        "helios/startup/signal_policy.py",
        "        code = 1 if self._has_lost_rank else TRY_AGAIN",
        "        code = 1 if has_lost_rank() else TRY_AGAIN",
        "tests/distributed/test_signals.py::test_tasks_that_all_hang_ask_to_be_requeued",
    ),
    Fault(
        "jobs of an array share a port",
        "helios/launch/launcher.py",
        '(job + zlib.crc32(b"%d" % step))',
        'zlib.crc32(b"%d.%d" % (job, step))',
        "tests/launch/test_launcher.py::test_no_two_jobs_of_an_array_have_one_port",
    ),
    Fault(
        "rank 0 is sought on a machine that no job names",
        "helios/launch/launcher.py",
        'return re.sub(r"\\[(\\w+)[^]]*\\]", r"\\1", first[0] if first else "")',
        'return first[0] if first else ""',
        "tests/launch/test_launcher.py::test_rank_0_is_on_the_first_machine_of_the_step",
    ),
    Fault(
        "ranks of another job are taken for own",
        "helios/distributed/process_groups.py",
        "is_torchrun else urlsplit(meeting).path",
        "is_torchrun else meeting[:3]",
        "tests/distributed/test_collectives.py::test_ranks_of_another_job_at_the_same_port_are_not_taken_for_own",
    ),
    Fault(
        "nobody says how to change a port that is in use",
        "helios/distributed/process_groups.py",
        '        if "EADDRINUSE" not in str(error):',
        "        if error:",
        "tests/distributed/test_collectives.py::test_a_port_that_is_in_use_is_named_with_its_variable",
    ),
    Fault(
        "git waits for the end of a forked worker",
        "helios/ledger/source_files.py",
        "                close_fds=False,\n",
        "",
        "tests/ledger/test_manifest.py::test_git_is_started_without_a_pipe_that_a_forked_worker_would_keep_open",
    ),
    Fault(
        "types of the script have another name in ranks that it started",
        "helios/storage/type_converters.py",
        "    is_of_rank = name.startswith(_OF_STARTED_RANK)",
        "    is_of_rank = False",
        "tests/storage/test_user_types.py::test_a_script_and_a_rank_that_it_started_read_each_others_types",
    ),
    Fault(
        "two loggers write one file",
        "helios/startup/objects.py",
        "            if isinstance(other, RowLogger) and other.path == plugin.path:",
        "            if False:",
        "tests/plugins/test_row_loggers.py::test_two_loggers_must_not_write_one_file",
    ),
    Fault(
        "a sampler that changes itself is not named",
        "helios/data/replayed_sampler.py",
        "            if changed:",
        "            if False:",
        "tests/data/test_replayed_sampler.py::test_what_a_sampler_changes_about_itself_is_named_once",
    ),
)


def _copy(target: Path) -> None:
    # With the bytecode, or each of them would compile everything anew.
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "*.egg-info", "*-output")
    shutil.copytree(ROOT, target, ignore=skipped)


def _pytest(tree: Path, *arguments: str, seconds: float | None) -> subprocess.CompletedProcess[str]:
    # The copy comes first on the path, before the installed package.
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command += ["-m", "not full and not gpu"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, cwd=tree, env=environment, **pipes) as process:
        output, errors = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _find_broken(tests: Sequence[str], jobs: int) -> dict[str, str]:
    """Return the tests that do not pass without a fault, and how they end."""
    # All in one run, because starting takes longer than most tests.
    done = _pytest(ROOT, "-n", str(jobs), "--dist=worksteal", *tests, seconds=None)
    if done.returncode == 0:
        return {}
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)", done.stdout, re.MULTILINE)
    # An error in the collection names no test.
    suspects = [test for test in tests if any(name.startswith(test) for name in failed)]
    ends = {test: _outcome(ROOT, test) for test in suspects or tests}
    return {test: end for test, end in ends.items() if end != PASSED}


def _outcome(tree: Path, test: str) -> str:
    """Return how the test ends in `tree`: PASSED, FAILED, or a text that begins with NOT RUN."""
    try:
        done = _pytest(tree, "-x", test, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return FAILED
    # A test that fails halfway may leave a SIGINT under way that it meant to catch: pytest then
    # ends with 2, but names the test first. An error in the collection names no test.
    if done.returncode in (1, 2) and re.search(r"^(FAILED|ERROR) \S+::", done.stdout, re.MULTILINE):
        return FAILED
    if done.returncode == 0:
        return PASSED
    output = f"{done.stdout}\n{done.stderr}".strip()
    errors = re.findall(r"^E(?: +|RROR:? ).*", output, re.MULTILINE)
    said = [*errors, output.rpartition("\n")[2]][0]
    return f"NOT RUN (pytest ended with {done.returncode}: {said})"


def _try(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        file = tree / fault.file
        text = file.read_text()
        if text.count(fault.good) != 1:
            return f"cannot be planted: its text is there {text.count(fault.good)} times"
        file.write_text(text.replace(fault.good, fault.bad))
        outcome = _outcome(tree, fault.test)
        return {FAILED: "seen", PASSED: "NOT SEEN"}.get(outcome, outcome)


def run(names: Sequence[str], jobs: int) -> int:
    """Plant the faults whose name holds one of some texts."""
    chosen = [fault for fault in FAULTS if any(name in fault.name for name in names)]
    tests = sorted({fault.test for fault in chosen})
    broken = _find_broken(tests, jobs)
    for test, end in broken.items():
        print(f"{'FAILS WITHOUT A FAULT' if end == FAILED else end}  {test}", flush=True)
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for fault, result in zip(chosen, pool.map(_try, chosen), strict=True):
                print(f"{result:10} {fault.name:55} {fault.test}", flush=True)
                results.append(result)
        except BaseException:
            # Those of other threads, for which the pool would wait.
            end_all()
            raise
    seen = results.count("seen")
    print(f"{seen} of {len(chosen)} faults are seen.")
    return 0 if seen == len(chosen) and not broken else 1


def find_lost() -> list[str]:
    """Return a line for each fault whose text is not there once."""
    return [
        f"{fault.name}: its text is in {fault.file} {count} times"
        for fault in FAULTS
        if (count := (ROOT / fault.file).read_text().count(fault.good)) != 1
    ]

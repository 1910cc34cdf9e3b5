"""Steps that are left out: nothing is done, and the answer is always the same."""

from __future__ import annotations

import copy
from typing import Any

from tests.planted.planting import fault

LEFT_OUT = {
    "sums of a container are not compared": (
        "helios.storage.container_checks:check_container",
        "tests/checkpoint/test_loading.py::test_a_file_without_sidecar_is_still_checked_by_the_sums_of_its_container",
    ),
    "name sidecar and content are not compared": (
        "helios.checkpoint.loading:check_agreement",
        "tests/checkpoint/test_mutations.py",
    ),
    "a damaged checkpoint is not put aside": (
        "helios.checkpoint.store:RunFolder.rename_damaged",
        "tests/checkpoint/test_loading.py::test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken",
    ),
    "a run whose checkpoints are damaged begins anew": (
        "helios.checkpoint.store:RunFolder._refuse_silent_restart",
        "tests/checkpoint/test_loading.py::test_when_all_are_damaged_no_start_begins_afresh_in_silence",
    ),
    "retention deletes what the run was resumed from": (
        "helios.checkpoint.store:RunFolder.protect",
        "tests/checkpoint/test_store.py::test_retention_deletes_file_and_sidecar_but_not_the_one_resumed_from",
    ),
    "a new name is not on the disk": (
        "helios.storage.files:fsync_folder",
        "tests/storage/test_files.py::test_a_folder_is_synced",
    ),
    "the folder of a run is not locked": (
        "helios.storage.folder_lock:FolderLock.acquire",
        "tests/integration/test_two_runs.py::test_a_second_fit_says_who_uses_the_folder_and_changes_nothing",
    ),
    "a state is not copied before training goes on": (
        "helios.storage.staging:HostBuffers.copy",
        "tests/checkpoint/test_checkpoint_writer.py::test_the_file_holds_what_was_there_at_the_call",
    ),
    "an error of a save in a thread is lost": (
        "helios.checkpoint.checkpoint_writer:PlainWriter._raise_own_failure",
        "tests/checkpoint/test_checkpoint_writer.py::test_other_failures_wait_for_the_next_safe_point_to_be_raised",
    ),
    "the index of a sharded checkpoint is believed": (
        "helios.storage.dcp_folder:_require",
        "tests/checkpoint/test_sharded_folders.py::test_a_hostile_index_is_refused",
    ),
    "the checkpoint of another run is taken": (
        "helios.start.origin:check_run_name",
        "tests/integration/test_which_run.py::test_another_runs_folder_is_refused_by_both_names",
    ),
    "the scale of fp16 is not loaded": (
        "helios.engines.precision:LossScaler.load_state_dict",
        "tests/engines/test_scaler.py::test_the_whole_scaler_is_state",
    ),
    "gradients are clipped before they are unscaled": (
        "helios.engines.precision:LossScaler.unscale",
        "tests/engines/test_scaler.py::test_backward_scales_and_the_average_unscales",
    ),
    "a file of rows is not cut back at a resume": (
        "helios.storage.row_file:RowFile._drop_rest",
        "tests/storage/test_row_file.py::test_a_file_is_cut_back_to_its_mark_and_goes_on",
    ),
    "the state of a metric is not restored": (
        "helios.plugins.metrics:_MetricSet.load_state_dict",
        "tests/plugins/test_metrics.py::test_a_resume_anywhere_gives_the_same_values",
    ),
    "gradients of earlier micro batches are not set aside": (
        "helios.replicas.gradients:Gradients.set_aside",
        "tests/loops/test_own_losses.py::test_between_its_losses_a_loop_sees_the_gradient_of_one_micro_batch",
    ),
    "a ledger is not cut back at a resume": (
        "helios.storage.files:truncate",
        "tests/ledger/test_book.py",
    ),
    "a checkpoint is committed without its lines": (
        "helios.ledger.book:Book.sync",
        "tests/ledger/test_runs.py::test_no_checkpoint_is_saved_without_its_lines",
    ),
    "a resume says nothing of another machine": (
        "helios.start.resume:_compare_machine",
        "tests/ledger/test_run_file.py::test_another_machine_than_that_of_the_checkpoint_is_one_warning",
    ),
    "a resume does not fetch the last batch again": (
        "helios.start.resume:DataCheck.before_load",
        "tests/integration/test_moved_data.py::test_a_start_that_must_be_complete_is_refused",
    ),
    "attributes that a trial changes are not put back": (
        "helios.backup:Backup.restore",
        "tests/loops/test_sanity_validation.py::test_what_a_trial_has_changed_is_put_back",
    ),
    "a finished run does not send what the server lacks": (
        "helios.plugins.server_loggers:ServerLogger.load_state_dict",
        "tests/plugins/test_server_loggers.py::test_servers_that_are_down_get_all_points_when_they_answer_again",
    ),
    "what setup makes of loaded weights is lost": (
        "helios.start.model_setup:SetupContext.check_loads",
        "tests/test_finetune.py::test_what_no_checkpoint_would_hold_is_refused_before_training",
    ),
    "what was thawed is left out again": (
        "helios.checkpoint.frozen:FrozenWeights.keep",
        "tests/checkpoint/test_frozen.py::test_what_is_thawed_or_changed_is_saved_from_then_on",
    ),
    "steps of a validation are not seeded": (
        "helios.loops.evaluation:EvaluationLoop._seed",
        "tests/loops/test_evaluation_shares.py::test_one_replica_draws_by_step_alone",
    ),
    "the global generator of numpy is not seeded": (
        "helios.core.rng:_seed_numpy_global",
        "tests/integration/test_numpy_global.py::test_what_a_script_draws_before_has_no_influence",
    ),
    "the old file of a migration is not kept": (
        "helios.migration.folder_migration:_back_up",
        "tests/migration/test_migration_kills.py",
    ),
    "a run that learns nothing is saved": (
        "helios.state.steps:IdleWatch.conclude",
        "tests/integration/test_idle_steps.py",
    ),
    "a loss that is not finite is not said": (
        "helios.core.loss_means:LossMeans._warn_of_nonfinite",
        "tests/loops/test_nonfinite_loss.py",
    ),
    "what a hook assigns to the context is kept apart": (
        "helios.hooks.context:Context.__setattr__",
        "tests/hooks/test_context_read_only.py",
    ),
    "the options of a run are lost when others are allowed": (
        "helios.cli.config_file:ConfigFile._keep",
        "tests/cli/test_train_command.py::test_other_values_are_refused_and_leave_the_file_alone",
    ),
    "sums of losses are not saved": (
        "helios.core.loss_means:LossMeans.capture",
        "tests/integration/test_mean_losses.py::test_rows_after_a_kill_between_two_points_are_those_of_an_undisturbed_run",
    ),
    "the time of iterations has validations": (
        "helios.loops.epoch:EpochLoop._end_pause",
        "tests/ledger/test_run_file.py::test_iterations_have_their_own_time",
    ),
    "a sampler with state stays where it was drawn ahead to": (
        "helios.data.order:ReplayedOrder.leave",
        "tests/data/test_order.py::test_a_pass_that_is_cut_leaves_the_sampler_where_it_was_left",
    ),
    "a job whose rank has failed asks to be requeued": (
        "helios.distributed.process_groups:note_failure",
        "tests/distributed/test_signals.py::test_a_task_that_waits_for_one_that_failed_does_not_ask_to_be_requeued",
    ),
    "slurm ends tasks that are exiting with 75": (
        "helios.start.signals:Listener.ignore_the_rest",
        "tests/distributed/test_signals.py::test_tasks_of_srun_exit_with_75_even_if_slurm_terminates_them",
    ),
    "handlers of signals stay after fit": (
        "helios.core.signal_watch:SignalReceiver._give_back",
        "tests/core/test_signal_watch.py::test_signals_are_noted_and_what_was_found_is_there_again",
    ),
    "a forward that is computed again draws other numbers": (
        "helios.core.rng:load_states",
        "tests/sharding/test_recomputation.py::test_a_second_forward_starts_as_the_first_and_leaves_no_trace",
    ),
    "a forward is computed again with weights that have changed": (
        "helios.sharding.recomputation:_Start._require_unchanged",
        "tests/sharding/test_recomputation.py::test_parameters_that_are_changed_before_backward_are_an_error",
    ),
    "processes may gather different units": (
        "helios.sharding.sharded_gradients:UnitCalls._compare_one",
        "tests/sharding/test_unit_calls.py::test_other_units_are_named_before_they_are_gathered",
    ),
    "what a forward writes to sharded parameters is lost": (
        "helios.sharding.fsdp_adapter:ShardedUnit.watch_values",
        "tests/sharding/test_steps_of_users.py::test_what_shards_would_lose_is_refused",
    ),
    "a repeated step draws numbers": (
        "helios.sharding.repeated_steps:_set_generators",
        "tests/sharding/test_padding_turns.py::test_a_repeated_step_changes_nothing",
    ),
    "tables of losses and scores are not loaded": (
        "helios.checkpoint.capture:apply_tables",
        "tests/integration/test_resume.py::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    "plugins are not restored": (
        "helios.state.owners:OwnStates.restore",
        "tests/plugins/test_early_stopping.py::test_a_run_with_three_plugins_that_have_state_resumes_everywhere",
    ),
    "frozen layers are not frozen again": (
        "helios.state.networks:load_flags",
        "tests/integration/test_resume.py::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    "gradients of an open window are lost": (
        "helios.state.networks:load_grads",
        "tests/integration/test_resume.py"
        "::test_every_safe_point_inside_an_epoch_resumes[manual with open gradients]",
    ),
    "a network keeps the submodules of setup": (
        "helios.state.restoring:_register",
        "tests/state/test_references.py::test_a_submodule_that_is_exchanged_for_a_sibling_is_exchanged_again",
    ),
    "only the step of a replica is watched": (
        "helios.loops.loop:note_changes",
        "tests/integration/test_turns_of_replicas.py::test_what_an_event_of_a_turn_changes_is_named_with_the_event",
    ),
    "tensors keep the form that setup gave them": (
        "helios.state.restoring:_restore_parts",
        "tests/state/test_tensor_formats.py::test_what_training_makes_of_tensors_is_resumed",
    ),
    "plain values are not restored": (
        "helios.state.restoring:set_values",
        "tests/state/test_changes.py::test_every_plain_kind_comes_back_through_a_file",
    ),
    "generators of the model are not restored": (
        "helios.core.generators:load_generator",
        "tests/state/test_held_generators.py::test_a_generator_goes_on_where_it_was",
    ),
    "the state of an optimizer follows positions": (
        "helios.state.optimizers:arrange",
        "tests/state/test_optimizers.py::test_networks_that_are_built_in_another_order_keep_their_moments",
    ),
    "what is met a second time is written again": (
        "helios.storage.codes:Coder.refer",
        "tests/state/test_changes.py::test_two_names_of_one_list_are_two_names_of_one_list_after_a_resume",
    ),
    "references are not checked before a restore": (
        "helios.storage.building:Builder.check",
        "tests/state/test_shared_memory.py::test_an_alias_of_what_is_not_there_is_refused_before_anything_changes",
    ),
    "weights are not compared over processes": (
        "helios.loops.boundary:check_weights",
        "tests/loops/test_replicas.py::test_weights_that_differ_between_processes_are_refused_before_the_first_step",
    ),
    "a finished run shows its scores for other values": (
        "helios.start.changes:_refuse_other_values",
        "tests/integration/test_changed_start.py::test_a_finished_run_refuses_other_values",
    ),
    "groups keep the settings of the run": (
        "helios.model.schedulers:NewSettings._put_back",
        "tests/integration/test_new_settings.py::test_taken_settings_are_those_of_a_fresh_loop",
    ),
    "a replica goes on with the buffers of the one before it": (
        "helios.replicas.module_buffers:ReplicaBuffers.enter",
        "tests/replicas/test_module_buffers.py::test_each_replica_has_its_own_in_a_window",
    ),
    "gradients from before the run are added": (
        "helios.replicas.gradients:SharedGradients.drop_old",
        "tests/distributed/test_joined_late.py::test_parameters_that_join_an_optimizer_train_alike_on_any_number_of_processes",
    ),
    "a sum carries no message": (
        "helios.replicas.tree_reducer:TreeReducer.attach",
        "tests/distributed/test_exchanges.py::test_a_sum_carries_the_message_that_is_attached",
    ),
    "the buffers of replica 0 are not read": (
        "helios.replicas.module_buffers:ReplicaBuffers.read",
        "tests/replicas/test_module_buffers.py::test_each_replica_has_its_own_in_a_window",
    ),
    "the weights of losses are left out": (
        "helios.replicas.gradients:WindowWeights.pop_sum",
        "tests/distributed/test_weighted_losses.py::test_gradients_are_sums_that_are_divided_once[3-1-loss]",
    ),
}
"""The targets, and which tests must see it, by what breaks."""


ANSWERED = {
    "the digest of a checkpoint is not compared": (
        True,
        "helios.checkpoint.loading:FileChecks._verify",
        "tests/checkpoint/test_loading.py::test_a_damaged_checkpoint_is_put_aside_loudly_and_the_next_older_is_taken",
    ),
    "digests of sharded checkpoints are not compared": (
        True,
        "helios.checkpoint.loading:FolderChecks._verify",
        "tests/checkpoint/test_sharded_folders.py::test_one_flipped_bit_anywhere_is_named",
    ),
    "a ledger that does not match its checkpoint is continued": (
        b"",
        "helios.ledger.line:end_of",
        "tests/ledger/test_book.py",
    ),
    "a replay goes on after a difference": (
        "",
        "helios.start.replay:_Comparison.ask",
        "tests/ledger/test_replay.py::test_a_changed_script_is_found_where_it_differs_first",
    ),
    "nothing is seeded before a fetch": (
        True,
        "helios.data.loader:KeyedLoader.is_pure",
        "tests/integration/test_resume.py::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    "calls in an old file are no obstacle": (
        [],
        "helios.storage.codec:unsafe_globals",
        "tests/migration/test_migration_trust.py",
    ),
    "a migrated file must have the name of its counters": (
        True,
        "helios.checkpoint.sidecar:Sidecar.names_run",
        "tests/checkpoint/test_loading.py::test_a_migrated_file_may_carry_its_older_name",
    ),
    "a sampler of the users own is dropped in silence": (
        True,
        "helios.data.datamodule:_is_plain",
        "tests/data/test_datamodule.py::test_a_loader_that_no_options_stand_for_is_an_error_that_writes_the_replacement",
    ),
    "what a step leaves out is passed to it": (
        True,
        "helios.hooks.bus:_accepts",
        "tests/hooks/test_bus_signatures.py::test_a_step_may_leave_out_what_follows_the_batch",
    ),
    "a rank that a signal ends counts as a failure": (
        75,
        "helios.start.signals:find_signal_code",
        "tests/distributed/test_signals.py::test_an_interruption_starts_nothing_again[self]",
    ),
    "what data sets hold is not compared over processes": (
        {},
        "helios.start.processes:describe_data_sets",
        "tests/start/test_same_data_everywhere.py::test_processes_with_other_data_do_not_start",
    ),
    "what setup writes outside of initializers is lost": (
        True,
        "helios.start.keyed_init:KeyedInit._is_repeated",
        "tests/start/test_keyed_init.py::test_what_setup_would_lose_is_refused_by_name",
    ),
    "a signal is not looked for at boundaries": (
        False,
        "helios.requests:Agreement._look_around",
        "tests/integration/test_signals.py::test_each_of_the_four_signals_saves",
    ),
    "attributes of parameters are passed over": (
        [],
        "helios.state.walk:_own_attributes",
        "tests/state/test_references.py::test_attributes_of_parameters_and_of_hooks_come_back",
    ),
    "closures are passed over": (
        {},
        "helios.storage.plain_objects:cells_of",
        "tests/state/test_hidden_state.py::test_what_closures_and_default_arguments_hold_comes_back",
    ),
    "each owner has a copy of what two share": (
        {},
        "helios.state.discovery:Discovery.pop_values",
        "tests/state/test_references.py::test_what_two_owners_share_stays_shared",
    ),
    "memory that networks share is not looked at": (
        {},
        "helios.state.named:_storages_of_networks",
        "tests/state/test_tied_tensors.py::test_memory_that_training_shares_or_parts_is_named",
    ),
    "what an optimizer leaves out of its state is lost": (
        [],
        "helios.state.optimizers:tables_of",
        "tests/state/test_partial_optimizers.py::test_what_an_optimizer_leaves_out_resumes_to_the_same_bits",
    ),
    "elements of tensors are not compared": (
        0,
        "helios.storage.content_hash:tensor_sum",
        "tests/state/test_changes.py::test_a_write_through_data_is_seen_whatever_the_size",
    ),
    "what a loader has replaced is not linked again": (
        {},
        "helios.state.restoring:severed",
        "tests/state/test_aliases_into_loaders.py::test_what_is_held_of_a_loader_is_held_after_a_resume",
    ),
    "an own state dict counts as complete": (
        True,
        "helios.state.discovery:Coverage.has",
        "tests/state/test_owner_states.py::test_what_a_state_dict_of_its_own_leaves_out_is_saved",
    ),
    "a run at its end is relabelled": (
        False,
        "helios.start.changes:has_ended",
        "tests/integration/test_declared_params.py::test_a_run_that_was_killed_at_its_end_is_not_relabelled",
    ),
}
"""What is answered in their place, the targets and the tests, by what breaks."""


def _leave_out(name: str, answer: object, target: str, test: str) -> None:
    def leave_out(*args: Any, **more: Any) -> object:
        return copy.copy(answer)

    leave_out.__name__ = name.replace(" ", "_")
    fault(target, test)(leave_out)


for _name, _places in LEFT_OUT.items():
    _leave_out(_name, None, *_places)
for _name, _fault in ANSWERED.items():
    _leave_out(_name, *_fault)

"""Faults in how processes start, end and ask to be started again."""

from __future__ import annotations

from tests.planted.planting import fault

LAUNCHER = "tests/launch/test_launcher.py"
SIGNALS = "tests/distributed/test_signals.py"
WATCH = "tests/core/test_signal_watch.py"


@fault(
    "helios.launch.supervisor:Supervisor._end_all",
    f"{LAUNCHER}::test_an_interrupted_launcher_lets_ranks_tear_down_and_ends_them",
)
def a_launcher_that_is_interrupted_kills_its_ranks(end_all, supervisor, first=None):
    return None


@fault(
    "helios.launch.supervisor:choose_cause",
    f"{LAUNCHER}::test_the_first_cause_wins_over_what_follows_from_it",
)
def the_lowest_rank_in_trouble_is_taken_for_the_cause(choose_cause, ranks):
    return next((rank for rank in ranks if rank.has_trouble), None)


@fault(
    "helios.distributed.process_groups:note_failure",
    f"{SIGNALS}::test_a_task_that_waits_for_one_that_failed_does_not_ask_to_be_requeued",
)
def a_job_whose_rank_has_failed_asks_to_be_requeued(note_failure, store):
    return None


@fault(
    "helios.startup.signal_policy:Listener.ignore_the_rest",
    f"{SIGNALS}::test_tasks_of_srun_exit_with_75_even_if_slurm_terminates_them",
)
def slurm_ends_tasks_that_are_exiting_with_75(ignore_the_rest, listener):
    return None


@fault(
    "helios.engines.numerics:numerics",
    "tests/integration/test_resume.py::test_two_threads_stay_two_threads",
)
def the_number_of_threads_is_not_restored(numerics, **more):
    return numerics(**{**more, "num_threads": None})


@fault(
    "helios.core.signal_watch:SignalReceiver._give_back",
    "tests/core/test_signal_watch.py::test_signals_are_noted_and_what_was_found_is_there_again",
)
def handlers_of_signals_stay_after_fit(give_back, receiver, number):
    return None


@fault(
    "helios.core.signal_watch:SignalReceiver._count_press",
    "tests/core/test_signal_watch.py::test_a_second_interrupt_is_obeyed_and_an_echo_of_the_first_is_not",
)
def an_echo_of_ctrl_c_ends_the_run(count_press, receiver):
    receiver._last_press = float("-inf")
    count_press(receiver)


@fault(
    "helios.core.signal_watch:SignalReceiver.stay",
    f"{WATCH}::test_a_process_that_is_to_exit_by_itself_is_ended_by_no_signal",
)
def a_signal_ends_an_interpreter_that_is_being_torn_down(stay, receiver):
    receiver._stays = True


@fault(
    "helios.core.signal_watch:SignalReceiver._give_back",
    f"{WATCH}::test_a_handler_of_the_user_is_restored_in_such_a_process_too",
)
def a_process_that_is_to_exit_keeps_the_handler_of_the_user_away(give_back, receiver, number):
    if not receiver._stays:
        give_back(receiver, number)


HANGS = "tests/startup/test_hang_watch.py"


@fault(
    "helios.startup.hangs:_find_known",
    f"{HANGS}::test_a_loader_that_hangs_is_named_again_and_again",
)
def a_rank_that_waits_is_in_helios(find_known, module):
    return None


@fault(
    "helios.distributed.heartbeats:Heartbeats._post",
    f"{HANGS}::test_ranks_that_wait_name_the_one_that_they_wait_for",
)
def ranks_that_wait_do_not_speak_with_each_other(post, heartbeats, words):
    return None


LOST = "tests/data/test_lost_workers.py"


@fault("helios.data.loader:_walk", f"{LOST}::test_a_worker_that_is_lost_changes_no_bit")
def new_workers_do_not_fetch_what_was_under_way(walk, items, owed):
    for item in items:
        owed.append(item)
        yield item


@fault(
    "helios.data.workers:_describe_deaths",
    f"{LOST}::test_a_worker_that_dies_within_a_message_is_replaced",
)
def a_death_is_an_error_of_the_run(describe_deaths, items):
    return ""


@fault(
    "helios.data.loader:FetchedBatches._describe_next",
    f"{LOST}::test_a_batch_that_ends_every_worker_is_named",
)
def the_samples_that_end_every_worker_are_not_named(describe_next, batches):
    return ""


HANG_ENDS = "tests/startup/test_hang_end.py"


@fault(
    "helios.startup.hangs:_find_newest",
    f"{HANG_ENDS}::test_a_second_hang_in_a_row_is_not_tried_again_unless_a_checkpoint_was_committed",
)
def a_hang_after_a_checkpoint_counts_as_the_same(find_newest, folder):
    return ""


@fault(
    "helios.startup.hangs:forget_hang",
    f"{HANG_ENDS}::test_a_second_hang_in_a_row_is_not_tried_again_unless_a_checkpoint_was_committed",
)
def a_hang_is_remembered_after_a_start_that_ended_in_another_way(forget_hang, folder):
    return None


@fault(
    "helios.startup.hangs:HangWatch.hurry",
    f"{HANG_ENDS}::test_ranks_that_got_a_signal_say_who_waits_for_whom",
)
def ranks_that_got_a_signal_do_not_ask_where_the_others_are(hurry, watch, seconds):
    return None


@fault(
    "helios.startup.hangs:write_to_stderr",
    f"{HANG_ENDS}::test_an_end_without_a_safe_point_needs_no_lock_of_the_log",
)
def a_process_ends_in_silence_that_holds_the_lock_of_the_log(write_to_stderr, text):
    return None


@fault(
    "helios.data.workers:gc.freeze",
    f"{LOST}::test_a_worker_frees_nothing_that_the_training_process_has_dropped",
)
def a_loader_worker_frees_what_its_parent_has_dropped(freeze):
    return None


@fault(
    "helios.startup.processes:describe_data_sets",
    "tests/startup/test_same_data_everywhere.py::test_processes_with_other_data_do_not_start",
)
def what_data_sets_hold_is_not_compared_over_processes(describe_data_sets, sources):
    return {}

"""Faults in how processes start, end and ask to be started again."""

from __future__ import annotations

from tests.planted.planting import fault

LAUNCHER = "tests/launch/test_launcher.py"


@fault(
    "helios.launch.spawning:_Launch._end",
    f"{LAUNCHER}::test_an_interrupted_launcher_lets_ranks_tear_down_and_ends_them",
)
def a_launcher_that_is_interrupted_kills_its_ranks(end, launch, *numbers):
    end(launch)


@fault(
    "helios.engines.numerics:numerics",
    "tests/integration/test_resume.py::test_threads_are_those_of_the_first_start_and_one_for_several_replicas",
)
def the_number_of_threads_is_not_restored(numerics, **more):
    return numerics(**{**more, "num_threads": 1})


@fault(
    "helios.engines.numerics:choose_threads",
    "tests/integration/test_resume.py::test_threads_are_those_of_the_first_start_and_one_for_several_replicas",
)
def replicas_begin_with_the_threads_of_their_process(choose_threads, stored, num_replicas):
    return choose_threads(stored, 1)


@fault(
    "helios.core.signal_watch:SignalReceiver._count_press",
    "tests/core/test_signal_watch.py::test_a_second_interrupt_is_obeyed_and_an_echo_of_the_first_is_not",
)
def an_echo_of_ctrl_c_ends_the_run(count_press, receiver):
    receiver._last_press = float("-inf")
    count_press(receiver)


LOST = "tests/data/test_lost_workers.py"


@fault(
    "helios.data.source:_HealedBatches._open_again",
    f"{LOST}::test_a_worker_that_is_lost_changes_no_bit",
)
def new_workers_begin_one_batch_too_late(open_again, batches, loss):
    batches._batch += 1
    open_again(batches, loss)

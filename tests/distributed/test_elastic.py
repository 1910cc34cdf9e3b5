"""The flagship: a run is its replicas; who carries them changes no bit.

Losses, sample ids, augmented images, weights, buffers, optimizer state, counters and generators are
compared on bytes, undisturbed and after kills with a restart on another number of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.elastic import Bits, Elastic, KillRank, assert_same, read_bits, train
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, alone, run_ranks

EPOCHS_BY_STEPS = {1: 12, 2: 6}
"""Steps of three epochs of 29 samples over 4 replicas of 2, by accumulation."""


class Interrupt(Quiet):
    """One rank alone asks for the end of this start, after some steps."""

    unsaved = ("num_left",)

    def __init__(self, num_steps: int, rank: int) -> None:
        super().__init__()
        self.num_left = num_steps
        self.rank_that_asks = rank

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self.num_left -= 1
        if self.num_left == 0 and self.trainer.rank == self.rank_that_asks:
            self.context.interrupt("the test says so")


class InterruptAtSave(Quiet):
    """The last rank asks for the end while the first checkpoint is taken."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.context.rank == self.context.num_processes - 1:
            self.context.interrupt("the test says so")


def work(rank: int, folder: Path, setting: Elastic, *plugins: Plugin) -> None:
    with alone():
        train(folder, setting, *plugins)


def run(folder: Path, num_processes: int, setting: Elastic, *plugins: Plugin) -> None:
    """Start once, in as many processes."""
    run_ranks(work, num_processes, folder, setting, *plugins)


def run_to_end(folder: Path, num_processes: int, setting: Elastic) -> Bits:
    run(folder, num_processes, setting)
    return read_bits(folder)


def make_setting(num_replicas: int, accumulation: int, **more: Any) -> Elastic:
    steps = EPOCHS_BY_STEPS[accumulation]
    return Elastic(num_replicas=num_replicas, accumulation=accumulation, total_steps=steps, **more)


QUICK = [(4, 3, 1), (4, 2, 2), (3, 3, 1)]
FULL = [
    (num_replicas, num_processes, accumulation)
    for num_replicas, processes in ((4, (4, 3, 2)), (3, (3, 2)), (6, (4, 2)))
    for num_processes in processes
    for accumulation in (1, 2)
]


@pytest.mark.shows("E43", "P4")
@pytest.mark.parametrize(
    ("num_replicas", "num_processes", "accumulation"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in FULL],
)
def test_any_number_of_processes_gives_the_same_bits(
    tmp_path: Path, num_replicas: int, num_processes: int, accumulation: int
) -> None:
    setting = make_setting(num_replicas, accumulation)
    alone = run_to_end(tmp_path / "alone", 1, setting)
    several = run_to_end(tmp_path / "several", num_processes, setting)
    assert_same(several, alone)
    replicas = {replica for _, replica in alone.turns}
    assert replicas == set(range(num_replicas))


@pytest.mark.shows("H7", "P4")
@pytest.mark.parametrize(
    ("unit", "order"),
    [
        ("iteration", (4, 3, 2, 1)),
        pytest.param("iteration", (1, 2, 3, 4), marks=pytest.mark.full),
        pytest.param("epoch", (3, 1, 4, 2), marks=pytest.mark.full),
    ],
)
def test_each_start_may_have_another_number_of_processes(
    tmp_path: Path, unit: str, order: tuple[int, ...]
) -> None:
    steps = 12 if unit == "iteration" else 3
    setting = Elastic(num_replicas=4, unit=unit, total_steps=steps)
    alone = run_to_end(tmp_path / "alone", 1, setting)
    for number, num_processes in enumerate(order):
        asker = number % num_processes
        run(tmp_path / "several", num_processes, setting, Interrupt(2 + number, asker))
    run(tmp_path / "several", order[0], setting)
    assert_same(read_bits(tmp_path / "several"), alone)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_is_asked_for_behind_a_safe_point_waits_for_the_next(
    tmp_path: Path, num_processes: int
) -> None:
    """One process alone asks; the run leaves at the same step for any number of them."""
    run(tmp_path, num_processes, make_setting(2, 1), InterruptAtSave())
    assert sorted(read_bits(tmp_path).means) == [1, 2]


KILLS = [
    ("on_backward_end", 2, 1),
    ("on_validation_batch_start", 5, 0),
    ("on_save_checkpoint", 3, 2),
    ("on_optimizer_step_start", 4, None),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("event", "iteration", "rank"), KILLS)
def test_after_a_kill_another_number_of_processes_goes_on(
    tmp_path: Path, event: str, iteration: int, rank: int | None
) -> None:
    setting = make_setting(4, 1)
    alone = run_to_end(tmp_path / "alone", 1, setting)
    with pytest.raises(RankError, match="-9"):
        run(tmp_path / "several", 3, setting, KillRank(event, iteration, rank))
    run(tmp_path / "several", 2, setting)
    assert_same(read_bits(tmp_path / "several"), alone)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_workers_and_epochs_change_no_bit_either(tmp_path: Path, unit: str) -> None:
    steps = 3 if unit == "epoch" else 12
    setting = Elastic(num_replicas=3, unit=unit, total_steps=steps, accumulation=2)
    alone = run_to_end(tmp_path / "alone", 1, setting)
    with_workers = Elastic(**{**vars(setting), "num_workers": 2})
    assert_same(run_to_end(tmp_path / "several", 2, with_workers), alone)

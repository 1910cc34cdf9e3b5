"""Signals to a training on several processes: to who has started them, to one rank, to all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from tests.support.elastic import Elastic, assert_same, read_bits, train
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.signals import SignalAt, codes, newest, start, stick, undisturbed
from tests.support.slurm_cluster import wait_until

slow = pytest.mark.full  # starts Python several times: the second tier of the tests


def work(rank: int, folder: Path, setting: Elastic, *plugins: Any) -> int:
    trainer, _ = train(folder, setting, *plugins)
    return trainer.exit_code


@pytest.mark.shows("K42", "S12", "S36", "U3")
@pytest.mark.parametrize(
    ("unit", "rank"),
    [
        ("iteration", 2),
        pytest.param("epoch", 0, marks=slow),
        pytest.param("iteration", 0, marks=slow),
        pytest.param("epoch", 2, marks=slow),
    ],
)
def test_a_signal_to_one_rank_ends_all_at_one_place(unit: str, rank: int, tmp_path: Path) -> None:
    setting = Elastic(
        num_replicas=3,
        chkpt_frequency=1000,
        unit=unit,
        total_steps=12 if unit == "iteration" else 3,
    )
    alone = undisturbed(tmp_path / "alone", setting)
    folder = tmp_path / "run"
    assert run_ranks(work, 3, folder, setting, SignalAt("on_forward_end", 3, rank=rank)) == [75] * 3
    assert newest(folder) == (1, 3)
    assert run_ranks(work, 3, folder, setting) == [0, 0, 0]
    assert_same(read_bits(folder), alone)


def be_task(rank: int, port: int) -> None:
    """Make this process one of two tasks of srun."""
    own = {"PROCID": rank, "LOCALID": rank, "STEP_ID": 0, "JOB_ID": 7, "STEP_NUM_TASKS": 2}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in own.items()}
    os.environ["MASTER_PORT"] = str(port)


def start_tasks(work: Callable[..., None], *args: Any) -> list[Any]:
    with socket.socket() as ear:
        ear.bind(("127.0.0.1", 0))
        port = ear.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    tasks = [fork.Process(target=work, args=(rank, port, *args)) for rank in (0, 1)]
    for task in tasks:
        task.start()
    return tasks


def be_interrupted(rank: int, port: int, folder: Path, setting: Elastic) -> None:
    """Train as a task, which SLURM terminates after another one has exited."""
    be_task(rank, port)
    signals = SignalAt("on_forward_end", 3, (signal.SIGUSR1,), rank=1)
    trainer, _ = train(folder, setting, signals)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(trainer.exit_code)


@pytest.mark.shows("P83")
def test_tasks_of_srun_exit_with_75_even_if_slurm_terminates_them(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=2, chkpt_frequency=1000, total_steps=8)
    tasks = start_tasks(be_interrupted, tmp_path, setting)
    for task in tasks:
        task.join()
    assert [task.exitcode for task in tasks] == [75, 75]
    assert newest(tmp_path) == (1, 3)


class Hanging(Quiet):
    """Ranks that wait in C for what never comes, as in a collective of NCCL; one of them fails.

    Each leaves a file just before.
    """

    def __init__(self, failing: int | None, folder: Path) -> None:
        super().__init__()
        self.failing = failing
        self.folder = folder

    def on_training_batch_end(self, *_: Any) -> None:
        if self.context.global_rank == self.failing:
            raise ValueError("as every time")
        (self.folder / f"waits-{self.context.global_rank}").touch()
        stick()


def hang(rank: int, port: int, folder: Path, setting: Elastic, failing: int | None) -> None:
    """Train as a task that comes to no safe point."""
    be_task(rank, port)
    train(folder, setting, Hanging(failing, folder), signals=helios.Signals(grace=1.0))


@pytest.mark.shows("P109")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_task_that_waits_for_one_that_failed_does_not_ask_to_be_requeued(
    failing: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    setting = Elastic(num_replicas=2, chkpt_frequency=1000, total_steps=8)
    tasks = start_tasks(hang, tmp_path, setting, failing)
    tasks[failing].join()
    wait_until((tmp_path / f"waits-{1 - failing}").exists, "the other task waits")
    # As SLURM does with --kill-on-bad-exit.
    tasks[1 - failing].terminate()
    tasks[1 - failing].join()
    assert [task.exitcode for task in tasks] == [1, 1]
    assert "exit code 1. Another rank had failed before: its log" in capfd.readouterr().err


@slow
@pytest.mark.parametrize("to", ["self", "parent"])
def test_ranks_of_torchrun_save_and_say_75(to: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = ("--at", "on_forward_end", "--iteration", 4, "--rank", 1, "--to", to)
    code, log = start(folder, *line, torchrun=3)
    assert (code, codes(folder)) == (1, [75] * 3), log
    assert newest(folder)[1] >= 4
    code, log = start(folder, torchrun=3)
    assert code == 0, log
    setting = Elastic(num_replicas=3, chkpt_frequency=1000)
    assert_same(read_bits(folder), undisturbed(tmp_path / "alone", setting))


@slow
@pytest.mark.parametrize("to", ["self", "parent"])
def test_an_interruption_starts_nothing_again(to: str, tmp_path: Path) -> None:
    """A rank that gets the signal does not come to a safe point: then all end without a save."""
    folder = tmp_path / "run"
    folder.mkdir()
    line = [folder, "--steps", 8, "--replicas", 2, "--frequency", 2, "--nproc", 2]
    options = ["--at", "on_forward_end", "--iteration", 5, "--rank", 1, "--to", to]
    options += ["--stick", "--grace", 1] if to == "self" else []
    code, log = start(*line, *options, "--restarts", 1)
    assert code == 75, log
    assert ("No safe point was reached within 1 s after SIGTERM" in log) == (to == "self")
    assert "Starting all ranks again" not in log
    code, log = start(*line)
    assert code == 0, log
    assert_same(read_bits(folder), undisturbed(tmp_path / "alone", Elastic(2, total_steps=8)))

"""Starting processes and ending them: results, errors, kills, and nothing left over."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import helios
from helios.core.signal_watch import SignalReceiver
from helios.distributed import collectives, process_groups
from helios.errors import UsageError
from helios.launch import rank as ranks
from helios.launch.launcher import Launch, LaunchKind
from helios.launch.rank import RankQueue
from helios.launch.spawning import spawn
from tests.support.kills import all_gone, is_gone
from tests.support.ranks import let_launcher_start_from_server
from tests.support.started import started

slow = pytest.mark.full  # starts Python several times: the second tier of the tests

_ROOTS = (Path(helios.__file__ or "").parents[1], Path(__file__).parents[2])
_TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "5",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_RUN_ID": "none",
}
_SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4711",
}


def wait_forever() -> None:
    threading.Event().wait()


def keep_the_interpreter() -> None:
    """Wait in C without letting any other thread run."""
    ctypes.PyDLL(None).pause()


def wait_for_the_others() -> None:
    collectives.all_reduce_tensors(torch.ones(2))


def say(text: str) -> None:
    """Print a line at once: ranks share the standard output of their launcher."""
    os.write(1, f"{text}\n".encode())


def work_in_full(
    rank: int, tensor: torch.Tensor, view: torch.Tensor, queue: RankQueue
) -> dict[str, Any]:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    queue.put(rank)
    queue.put(torch.full((12_500_000,), float(rank)))
    tensor.add_(rank + 1)
    summed = collectives.all_reduce_tensors(tensor.clone())
    if rank == 0:
        os.kill(launcher.pid, signal.SIGUSR1)
    return {
        "launch": Launch.read(),
        "own": view.tolist(),
        "summed": summed.tolist(),
        "forwarded": signal.sigwait({signal.SIGUSR1}),
        "start method": torch.multiprocessing.get_start_method(),
    }


@pytest.mark.shows("H51", "H65", "E30")
def test_ranks_form_a_group_and_hand_back_results_and_large_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_launcher_start_from_server(monkeypatch)
    tensor = torch.zeros(2)
    queue: Queue[Any] = Queue()
    queue.put("before")
    before = dict(os.environ)
    receiver = SignalReceiver([signal.SIGUSR1])
    with receiver.installed():
        results = spawn(work_in_full, 2, (tensor, tensor[:]), queue=queue, signals=receiver)
    for rank, result in enumerate(results):
        place = process_groups.DistributedInfo(rank, rank, 2, 2)
        assert result.pop("launch") == Launch(LaunchKind.SPAWN, place)
    assert [result.pop("own") for result in results] == [[1.0, 1.0], [2.0, 2.0]]
    expected = {
        "summed": [3.0, 3.0],
        "forwarded": signal.SIGUSR1,
        "start method": torch.multiprocessing.get_start_method(),
    }
    assert results == [expected, expected]
    assert os.environ == before
    assert tensor.tolist() == [0.0, 0.0]
    items = [queue.get_nowait() for _ in range(queue.qsize())]
    assert items.pop(0) == "before"
    sums = [item.sum().item() for item in items if isinstance(item, torch.Tensor)]
    assert sorted(sums) == [0.0, 12_500_000.0]
    assert sorted(item for item in items if isinstance(item, int)) == [0, 1]


def test_what_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"can be pickled, .*lambda"):
        spawn(print, 2, (lambda: 0,))


def fail_while_others_wait(rank: int, queue: RankQueue) -> None:
    queue.put(os.getpid())
    if rank == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_the_others()
    if rank == 1:
        raise KeyError("of rank 1")
    if rank == 0:
        wait_for_the_others()
    keep_the_interpreter()


@slow
def test_an_error_is_raised_again_and_ends_ranks_that_wait_or_do_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    queue: Queue[int] = Queue()
    with pytest.raises(KeyError) as caught:
        spawn(fail_while_others_wait, 3, queue=queue)
    assert caught.value.args == ("of rank 1",)
    cause = str(caught.value.__cause__)
    assert cause.lstrip().startswith("Raised by rank 1 of 3:\nTraceback")
    assert "in fail_while_others_wait" in cause
    assert all_gone([queue.get() for _ in range(3)])


class UnreadableError(Exception):
    """Can be pickled, and not restored."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first + second)


def leave_a_thread(rank: int, is_failing: bool, queue: RankQueue) -> int:
    threading.Thread(target=wait_forever).start()
    queue.put(UnreadableError(1, 2))
    queue.put(rank)
    if is_failing:
        raise LookupError(rank)
    return rank


@pytest.mark.shows("H51", "H65")
@pytest.mark.parametrize("is_failing", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rank_ends_though_a_thread_goes_on_and_an_item_cannot_be_read(
    is_failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_launcher_start_from_server(monkeypatch)
    items: Queue[Any] = Queue()
    with pytest.raises(LookupError) if is_failing else nullcontext():
        assert spawn(leave_a_thread, 2, (is_failing,), queue=items) == [0, 1]
        assert sorted(items.get() for _ in range(2)) == [0, 1]


def wait_to_be_interrupted(rank: int) -> None:
    try:
        say(str(os.getpid()))
        if rank == 0:
            wait_for_the_others()
        wait_forever()
    finally:
        if rank == 1:
            say("torn down")


def launch_and_be_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spawn(wait_to_be_interrupted, 2)


@slow
def test_an_interrupted_launcher_lets_ranks_tear_down_and_ends_them() -> None:
    code = f"from {__name__} import launch_and_be_interrupted as run; run()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _ROOTS))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started([sys.executable, "-c", code], env=environment, **pipes) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=120)
        assert output == "torn down\n"
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert all(map(is_gone, pids))
    assert launcher.returncode == -signal.SIGINT


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Read how a process was started that has these environment variables."""

    def read(variables: dict[str, str]) -> Launch:
        for name in (*_TORCHRUN, *_SRUN, "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launch.read()

    return read


def test_torchrun_tells_who_is_who(read: Callable[..., Launch]) -> None:
    place = process_groups.DistributedInfo(1, 5, 4, 8)
    assert read(_TORCHRUN) == Launch(LaunchKind.TORCHRUN, place, "env://")


def test_srun_tells_who_is_who_by_its_step(read: Callable[..., Launch]) -> None:
    meeting = "tcp://node1:4711/77.0.0"
    place = process_groups.DistributedInfo(1, 5, 2, 8)
    assert read(_SRUN) == Launch(LaunchKind.SRUN, place, meeting)
    again = {**_SRUN, "SLURM_RESTART_COUNT": "2"}
    assert read(again) == Launch(LaunchKind.SRUN, place, f"{meeting[:-1]}2")


@pytest.mark.shows("P83")
def test_no_two_jobs_of_an_array_have_one_port(read: Callable[..., Launch]) -> None:
    jobs = range(990, 3000)
    here = {**_SRUN, "MASTER_PORT": ""}
    places = set()
    for job in jobs:
        own = {"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(job % 5)}
        places.add(read({**here, **own}).meeting.split("/")[2])
    assert len(places) == len(jobs)


@pytest.mark.shows("P83")
@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-005,009],cpu1", "gpu003"),
        ("rack[1-2]n[04-07]-ib,rack3n01", "rack1n04-ib"),
        ("a.example.org,b.example.org", "a.example.org"),
    ],
)
def test_rank_0_is_on_the_first_machine_of_the_step(
    nodes: str, first: str, read: Callable[..., Launch]
) -> None:
    own = {"MASTER_ADDR": "", "SLURM_STEP_NODELIST": nodes}
    assert read({**_SRUN, **own}).meeting == f"tcp://{first}:4711/77.0.0"


def test_half_a_launcher_is_refused(read: Callable[..., Launch]) -> None:
    half = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2 .* LOCAL_RANK, GROUP_RANK, .* not set"):
        read(half)
    assert read({**half, "WORLD_SIZE": "1"}) == Launch()

"""Who we are among the processes, and the collectives that users call (H48, H64)."""

from __future__ import annotations

import datetime
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helios.distributed import collectives, process_groups
from helios.errors import RankError, UsageError
from tests.support.ranks import FORKSERVER, run_ranks

_VARIABLES = (
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    collectives.init_dist("gloo", rank=0, world_size=1)
    yield
    collectives.shutdown_dist()


def test_a_lone_process_is_rank_0_of_1() -> None:
    assert not process_groups.is_dist_active()
    assert collectives.get_dist_info() == process_groups.DistributedInfo(0, 0, 1, 1)
    assert collectives.get_local_rank() == collectives.get_global_rank() == 0
    assert collectives.get_local_world_size() == collectives.get_world_size() == 1


@pytest.mark.shows("H64", "C9")
def test_a_lone_process_may_wait_print_and_shut_down(capsys: pytest.CaptureFixture[str]) -> None:
    collectives.safe_barrier()
    collectives.shutdown_dist()
    collectives.global_print("to all", global_rank=3)
    collectives.local_print("to us", local_rank=3, end="!")
    assert capsys.readouterr().out == "to all\nto us!"


@pytest.mark.shows("H64")
def test_collectives_of_a_lone_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gather_into_tensor.* needs a process group"):
        collectives.gather_into_tensor(torch.ones(1), (1,))
    with pytest.raises(RuntimeError, match=r"all_reduce_tensors.* needs a process group"):
        collectives.all_reduce_tensors(torch.ones(1))


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 2}])
def test_rank_and_world_size_go_together(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="both or neither"):
        collectives.init_dist("gloo", **given)


@pytest.mark.shows("H51", "E29")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"rank": 0, "world_size": 2}, r"\(world_size=2\) .* MASTER_PORT, which are not set"),
        ({}, r"\(\) .* RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which are not set"),
    ],
)
def test_there_is_no_port_that_is_always_the_same(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], names: str
) -> None:
    """Two trainings on one machine would meet each other's ranks there (H51)."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=f"init_dist{names}.* with torchrun, or set MASTER_PORT"):
        collectives.init_dist("gloo", **given)
    assert not process_groups.is_dist_active()


def test_torchrun_is_known_by_all_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.setenv(name, "0")
    assert collectives.is_using_torchrun()
    for name in _VARIABLES:
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert not collectives.is_using_torchrun()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_needs_no_port_and_sums_itself() -> None:
    assert process_groups.is_dist_active()
    assert collectives.get_dist_info() == process_groups.DistributedInfo(0, 0, 1, 1)
    assert collectives.all_reduce_tensors([1.0, 2.0]).tolist() == [1.0, 2.0]


@pytest.mark.shows("E29")
def test_a_group_is_what_the_launcher_says_whatever_the_variables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with process_groups.membership(process_groups.DistributedInfo(), backend="gloo"):
        assert collectives.get_dist_info() == process_groups.DistributedInfo(0, 0, 1, 1)
        assert collectives.describe_rank() == ""
        with pytest.raises(UsageError, match="outside a process group"):
            process_groups.join_group(process_groups.DistributedInfo(), backend="gloo")
    assert not process_groups.is_dist_active()
    with pytest.raises(UsageError, match=r"control_group\(\) needs a process group"):
        process_groups.control_group()


@pytest.mark.usefixtures("group_of_one")
def test_after_a_collective_has_failed_none_may_follow() -> None:
    """The others may wait for something else (USERS 22)."""
    assert not process_groups.has_failed()
    with pytest.raises(TypeError):
        collectives.all_reduce_tensors("no tensor")  # type: ignore[arg-type]
    assert process_groups.has_failed()
    calls: list[Any] = [
        collectives.safe_barrier,
        lambda: collectives.all_reduce_tensors(torch.ones(1)),
        lambda: collectives.gather_into_tensor(torch.ones(1), (1,)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="after a collective has failed") as caught:
            call()
        assert isinstance(caught.value.__cause__, TypeError)
    process_groups.leave_group()
    collectives.init_dist("gloo", rank=0, world_size=1)
    collectives.safe_barrier()


@pytest.mark.shows("H63")
def test_an_error_leaves_the_group_that_was_joined() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        process_groups.membership(process_groups.DistributedInfo(), backend="gloo"),
    ):
        raise ZeroDivisionError
    assert not process_groups.is_dist_active()


def test_a_group_that_the_user_has_made_is_used_and_stays() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    for _ in range(2):
        with process_groups.membership(process_groups.DistributedInfo(), backend="gloo"):
            assert dist.group.WORLD is world
            assert dist.get_backend(process_groups.control_group()) == "gloo"
    assert dist.group.WORLD is world
    other = process_groups.DistributedInfo(rank=1, world_size=2)
    with (
        pytest.raises(UsageError, match="rank 1 of 2, got rank 0 of 1"),
        process_groups.membership(other, backend="gloo"),
    ):
        pass
    collectives.shutdown_dist()


def join_as_rank_1(meeting: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the store in which a new process would find the others."""
    monkeypatch.setattr(process_groups._Process, "stores", {})
    monkeypatch.setattr(process_groups._Process, "num_joins", 0)
    info = process_groups.DistributedInfo(1, 1, 2, 2)
    return process_groups._meet(info, meeting, datetime.timedelta(seconds=60))


@pytest.mark.shows("P83")
def test_ranks_of_another_job_at_the_same_port_are_not_taken_for_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = f"tcp://127.0.0.1:{server.port}"
    own, same, other = (
        join_as_rank_1(f"{place}/{job}", monkeypatch) for job in ("7.0.", "7.0.", "8.0.")
    )
    own.set("address", "here")
    assert same.get("address") == b"here"
    assert not other.check(["address"])


@pytest.mark.shows("P83")
def test_a_port_that_is_in_use_is_named_with_its_variable() -> None:
    info = process_groups.DistributedInfo(0, 0, 1, 2)
    with socket.socket() as ear:
        ear.bind(("", 0))
        ear.listen()
        port = ear.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} of localhost.* MASTER_PORT set to a"):
            process_groups.join_group(info, backend="gloo", meeting=f"tcp://localhost:{port}/7.0.")
    assert not process_groups.is_dist_active()


def _die_between_the_groups(meeting: str) -> None:
    dist.new_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    process_groups.join_group(
        process_groups.DistributedInfo(1, 1, 2, 2), backend="gloo", meeting=meeting
    )


def test_a_rank_that_dies_while_the_groups_are_made_is_not_awaited_for_hours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_groups, "_CONTROL_MEETING", datetime.timedelta(seconds=1))
    meeting = (tmp_path / "store").as_uri()
    other = FORKSERVER.Process(target=_die_between_the_groups, args=(meeting,))
    other.start()
    info = process_groups.DistributedInfo(0, 0, 2, 2)
    with pytest.raises(RankError, match=r"Rank 0 of 2 has waited \d+\.\d s for the other"):
        process_groups.join_group(info, backend="gloo", meeting=meeting)
    other.join(60)
    assert other.exitcode == -signal.SIGKILL
    assert not process_groups.is_dist_active()


def _fail_to_connect(**_: Any) -> None:
    threading.Event().wait(0.2)
    raise RuntimeError("Gloo connectFullMesh failed with Connect timeout")


def test_the_error_of_a_meeting_says_how_long_it_has_waited_and_not_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo may wait five times its timeout, or fail at once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "new_group", _fail_to_connect)
    begin = time.monotonic()
    with (
        pytest.raises(RankError) as found,
        process_groups.membership(process_groups.DistributedInfo(0, 0, 1, 1)),
    ):
        pass
    seconds = re.match(r"Rank 0 of 1 has waited (\d+\.\d) s for the other ranks", str(found.value))
    assert seconds is not None
    assert 0.2 <= float(seconds[1]) <= time.monotonic() - begin + 0.05
    dist.destroy_process_group()


def test_a_rank_that_dies_while_the_first_group_forms_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    monkeypatch.setattr(dist, "init_process_group", fail)
    info = process_groups.DistributedInfo(0, 0, 1, 1)
    with pytest.raises(RankError, match=r"Rank 0 of 1 has waited \d+\.\d s .* create the group,"):
        process_groups.join_group(info, backend="gloo", meeting=(tmp_path / "store").as_uri())


@pytest.mark.usefixtures("group_of_one")
def test_messages_of_control_may_take_longer_than_the_meeting() -> None:
    backend: Any = process_groups.control_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == process_groups.CONTROL_TIMEOUT


@pytest.mark.shows("H63")
def test_errors_that_follow_from_a_lost_peer_are_known() -> None:
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")
    follower, other = ValueError("a loss is missing"), ValueError("mine")
    follower.__cause__ = lost
    other.__context__, other.__suppress_context__ = lost, True
    assert process_groups.is_lost_peer(lost)
    assert process_groups.is_lost_peer(follower)
    assert process_groups.is_lost_peer(dist.DistNetworkError("the store is gone"))
    assert not process_groups.is_lost_peer(other)
    other.__context__ = other
    other.__suppress_context__ = False
    assert not process_groups.is_lost_peer(other)


@pytest.mark.usefixtures("group_of_one")
def test_in_a_group_only_the_named_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    collectives.global_print("rank 1", global_rank=1)
    collectives.local_print("local rank 1", local_rank=1)
    collectives.global_print("rank 0")
    assert capsys.readouterr().out == "rank 0\n"


def _gather_and_sum(rank: int) -> dict[str, Any]:
    mine = torch.tensor([[rank, 10 + rank]])
    strided = torch.arange(6.0).view(2, 3).T + rank
    leaf = torch.ones(2, requires_grad=True)
    return {
        "joined": collectives.gather_into_tensor(mine, (3, 2)),
        "stacked": collectives.gather_into_tensor(mine[0], (3, 2)),
        "low": collectives.gather_into_tensor(mine.bfloat16(), (3, 2)),
        "strided": collectives.gather_into_tensor(strided, (9, 2)),
        "graph": collectives.gather_into_tensor(leaf * 2, (6,)),
        "listed": collectives.all_reduce_tensors([torch.tensor(rank), torch.tensor(5)]),
        "numbers": collectives.all_reduce_tensors([1.0, 0.5]),
        "highest": collectives.all_reduce_tensors(torch.tensor(rank), op=dist.ReduceOp.MAX),
        "in place": collectives.all_reduce_tensors(mine) is mine,
        "home": collectives.home_of(mine),
    }


@pytest.mark.shows("H64")
def test_three_ranks_gather_and_sum_without_a_warning() -> None:
    """H64: in a rank of these tests a warning, such as that of a name to come, is an error."""
    for found in run_ranks(_gather_and_sum, 3):
        rows = [[0, 10], [1, 11], [2, 12]]
        assert found["joined"].tolist() == found["stacked"].tolist() == rows
        assert (found["low"].tolist(), found["low"].dtype) == (rows, torch.bfloat16)
        assert found["strided"].tolist()[::3] == [[rank, rank + 3.0] for rank in range(3)]
        assert found["graph"].tolist() == [2.0] * 6
        assert found["listed"].tolist() == [3, 15]
        assert found["numbers"].tolist() == [3.0, 1.5]
        assert found["highest"].item() == 2
        assert found["in place"] is True
        assert found["home"] == torch.device("cpu")


@pytest.mark.usefixtures("group_of_one")
def test_a_size_without_room_for_all_is_an_error_that_harms_no_group() -> None:
    with pytest.raises(ValueError, match=r"room for 1 tensors of shape \(2,\), got \(3,\)"):
        collectives.gather_into_tensor(torch.ones(2), (3,))
    assert collectives.gather_into_tensor(torch.ones(2), (1, 2)).tolist() == [[1.0, 1.0]]


@pytest.mark.shows("H51", "H64")
@pytest.mark.usefixtures("group_of_one")
def test_tensors_are_moved_to_where_the_backend_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """H64: under NCCL on the GPU of this process, under gloo on the CPU."""
    host, other = torch.ones(1), torch.ones(1, device="meta")
    assert collectives.home_of(host) == collectives.home_of(other) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for backend, home in (("nccl", "cuda:1"), ("custom", "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda group=None, backend=backend: backend)
        assert collectives.home_of(host) == torch.device(home)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_gpu_gathers_and_sums_on_any_backend(backend: str) -> None:
    """H64: tensors come back to where they were."""
    store = dist.HashStore()
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        for place in ("cpu", "cuda:0"):
            tensor = torch.ones(2, device=place)
            gathered = collectives.gather_into_tensor(tensor, (1, 2))
            assert (gathered.tolist(), gathered.device) == ([[1.0, 1.0]], tensor.device)
            assert collectives.all_reduce_tensors(tensor) is tensor
            assert collectives.all_reduce_tensors([tensor, tensor]).tolist() == [[1.0, 1.0]] * 2
        assert collectives.all_reduce_tensors([1.0, 2.0]).tolist() == [1.0, 2.0]
    finally:
        collectives.shutdown_dist()


def _join(rank: int, folder: str, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    collectives.init_dist("gloo", rank=rank, world_size=2)
    mine = torch.tensor([[rank, 10 + rank]])
    results = {
        "rank": collectives.describe_rank(),
        "info": collectives.get_dist_info(),
        "gathered": collectives.gather_into_tensor(mine, (2, 2)).tolist(),
        "summed": collectives.all_reduce_tensors(mine.clone()).tolist(),
        "listed": collectives.all_reduce_tensors([torch.tensor(rank), torch.tensor(5)]).tolist(),
    }
    process_groups.leave_group()
    # A test that follows a training joins again, and meets at the same place.
    collectives.init_dist("gloo", rank=rank, world_size=2)
    control = process_groups.control_group()
    results["control"] = collectives.all_reduce_tensors([rank, 7.0], group=control).tolist()
    results["backend"] = dist.get_backend(control)
    Path(folder, f"{rank}.txt").write_text(repr(results))
    collectives.safe_barrier()
    if rank == 1:
        _fail_with_a_collective_under_way(Path(folder))
    while not Path(folder, "left.txt").exists():
        threading.Event().wait(0.01)


def _fail_with_a_collective_under_way(folder: Path) -> None:
    begin = time.monotonic()
    dist.all_reduce(torch.ones(1), async_op=True)
    process_groups.leave_group(is_failing=True)
    text = f"{time.monotonic() - begin < 60} {process_groups.is_dist_active()}"
    (folder / "left.tmp").write_text(text)
    (folder / "left.tmp").rename(folder / "left.txt")


@pytest.mark.shows("H64", "E19")
def test_two_ranks_gather_and_sum_on_the_cpu(tmp_path: Path) -> None:
    """They join twice, and one of them leaves while a collective of its own waits for ever."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = (str(tmp_path), port)
    torch.multiprocessing.start_processes(_join, arguments, nprocs=2, start_method="forkserver")
    for rank in range(2):
        info = process_groups.DistributedInfo(rank, rank, 2, 2)
        expected = {
            "rank": f"rank {rank} of 2",
            "info": info,
            "gathered": [[0, 10], [1, 11]],
            "summed": [[1, 21]],
            "listed": [1, 10],
            "control": [1.0, 14.0],
            "backend": "gloo",
        }
        assert (tmp_path / f"{rank}.txt").read_text() == repr(expected)
    assert (tmp_path / "left.txt").read_text() == "True False"

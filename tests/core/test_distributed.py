"""Who we are among the processes, and the collectives that users call (H48, H64)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helios.core import distributed

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
    distributed.init_dist("gloo", rank=0, world_size=1)
    yield
    distributed.shutdown_dist()


def test_a_lone_process_is_rank_0_of_1() -> None:
    assert not distributed.is_dist_active()
    assert distributed.get_dist_info() == distributed.DistributedInfo(0, 0, 1, 1)
    assert distributed.get_local_rank() == distributed.get_global_rank() == 0
    assert distributed.get_local_world_size() == distributed.get_world_size() == 1


def test_a_lone_process_may_wait_print_and_shut_down(capsys: pytest.CaptureFixture[str]) -> None:
    distributed.safe_barrier()
    distributed.shutdown_dist()
    distributed.global_print("to all", global_rank=3)
    distributed.local_print("to us", local_rank=3, end="!")
    assert capsys.readouterr().out == "to all\nto us!"


def test_collectives_of_a_lone_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gather_into_tensor.* needs a process group"):
        distributed.gather_into_tensor(torch.ones(1), (1,))
    with pytest.raises(RuntimeError, match=r"all_reduce_tensors.* needs a process group"):
        distributed.all_reduce_tensors(torch.ones(1))


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 2}])
def test_rank_and_world_size_go_together(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="both or neither"):
        distributed.init_dist("gloo", **given)


def test_torchrun_is_known_by_all_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.setenv(name, "0")
    assert distributed.is_using_torchrun()
    for name in _VARIABLES:
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert not distributed.is_using_torchrun()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_needs_no_port_and_sums_itself() -> None:
    assert distributed.is_dist_active()
    assert distributed.get_dist_info() == distributed.DistributedInfo(0, 0, 1, 1)
    assert distributed.all_reduce_tensors([1.0, 2.0]).tolist() == [1.0, 2.0]


@pytest.mark.usefixtures("group_of_one")
def test_in_a_group_only_the_named_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    distributed.global_print("rank 1", global_rank=1)
    distributed.local_print("local rank 1", local_rank=1)
    distributed.global_print("rank 0")
    assert capsys.readouterr().out == "rank 0\n"


def _join(rank: int, folder: str, port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    distributed.init_dist("gloo", rank=rank, world_size=2)
    mine = torch.tensor([[rank, 10 + rank]])
    results = {
        "info": distributed.get_dist_info(),
        "gathered": distributed.gather_into_tensor(mine, (2, 2)).tolist(),
        "summed": distributed.all_reduce_tensors(mine.clone()).tolist(),
        "listed": distributed.all_reduce_tensors([torch.tensor(rank), torch.tensor(5)]).tolist(),
    }
    Path(folder, f"{rank}.txt").write_text(repr(results))
    distributed.safe_barrier()
    distributed.shutdown_dist()


def test_two_ranks_gather_and_sum_on_the_cpu(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(_join, args=(str(tmp_path), port), nprocs=2)
    for rank in range(2):
        info = distributed.DistributedInfo(rank, rank, 2, 2)
        expected = {
            "info": info,
            "gathered": [[0, 10], [1, 11]],
            "summed": [[1, 21]],
            "listed": [1, 10],
        }
        assert (tmp_path / f"{rank}.txt").read_text() == repr(expected)

"""Who we are among the processes, and the collectives that users call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helios.distributed import collectives, process_groups
from helios.errors import UsageError
from tests.support.ranks import run_ranks


@pytest.fixture
def group_of_one() -> Iterator[None]:
    collectives.init_dist("gloo", rank=0, world_size=1)
    yield
    collectives.shutdown_dist()


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


@pytest.mark.shows("H51", "E29")
@pytest.mark.parametrize(
    ("given", "name"), [({"rank": 0, "world_size": 2}, "MASTER_PORT"), ({}, "RANK")]
)
def test_there_is_no_port_that_is_always_the_same(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], name: str
) -> None:
    """Two trainings on one machine would meet each other's ranks there."""
    for variable in collectives.TORCHRUN_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RuntimeError, match=rf"variable {name}, which is not .* set MASTER_PORT"):
        collectives.init_dist("gloo", **given)
    assert not process_groups.is_dist_active()


@pytest.mark.usefixtures("group_of_one")
def test_after_a_collective_has_failed_none_may_follow() -> None:
    """The others may wait for something else."""
    assert not process_groups.has_failed()
    with pytest.raises(AttributeError):
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
        assert isinstance(caught.value.__cause__, AttributeError)
    process_groups.leave_group()
    collectives.init_dist("gloo", rank=0, world_size=1)
    collectives.safe_barrier()


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
    """In a rank of these tests a warning, such as that of a name to come, is an error."""
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_gpu_gathers_and_sums_on_any_backend(backend: str) -> None:
    """Tensors come back to where they were."""
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

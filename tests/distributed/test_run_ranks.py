"""The harness of these tests: results by rank, and an error that says which rank failed, where."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.full  # several processes: the second tier of the tests


def _sum_of_ranks(rank: int, start: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    total = start + rank
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is out of its depth")
    dist.barrier()


def _die(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _die_before_a_child(rank: int, until: Path) -> None:
    if os.fork() == 0:
        until.read_text()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(rank: int) -> None:
    if rank == 1:
        signal.pause()


def _warn(rank: int) -> None:
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)


def _read_variable(rank: int) -> str | None:
    return os.environ.get("OF_THIS_TEST")


def _give_a_function(rank: int) -> Any:
    return lambda: None


def test_results_come_by_rank() -> None:
    found = run_ranks(_sum_of_ranks, 3, torch.tensor([1.0, 2.0]))
    assert [rank for rank, _, _ in found] == [0, 1, 2]
    for _, total, num_threads in found:
        assert torch.equal(total, torch.tensor([6.0, 9.0]))
        assert num_threads == 1


def test_a_rank_has_the_variables_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(_read_variable, 1) == [None]
    monkeypatch.setenv("OF_THIS_TEST", "1")
    assert run_ranks(_read_variable, 2) == ["1", "1"]


def test_an_error_comes_with_the_rank_and_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)Rank 1 .*in _fail.*rank one is out of its depth"):
        run_ranks(_fail, 3)


def test_a_rank_that_dies_is_named_and_the_others_are_ended() -> None:
    with pytest.raises(RankError, match="Rank 2 failed: it ended with code -9"):
        run_ranks(_die, 3)


def test_a_rank_that_dies_is_noticed_while_its_children_live_on(tmp_path: Path) -> None:
    os.mkfifo(until := tmp_path / "until")
    with pytest.raises(RankError, match="Rank 0 failed: it ended with code -9"):
        run_ranks(_die_before_a_child, 1, until, timeout=60)
    until.write_text("")  # The child reads this, and so it was there.


def test_a_rank_that_hangs_is_ended_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="Not done in time"):
        run_ranks(_wait, 2, timeout=1)
    assert time.monotonic() - begin < 20


def test_a_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(RankError, match="this is old"):
        run_ranks(_warn, 1)


def test_a_result_that_cannot_be_sent_says_so() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(_give_a_function, 1)

"""The harness of these tests: results by rank, and an error that says which rank failed, where."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.full  # several processes: the second tier of the tests


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is out of its depth")
    dist.barrier()


def _die(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _warn(rank: int) -> None:
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)


def test_an_error_comes_with_the_rank_and_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)Rank 1 .*in _fail.*rank one is out of its depth"):
        run_ranks(_fail, 3)


def test_a_rank_that_dies_is_named_and_the_others_are_ended() -> None:
    with pytest.raises(RankError, match="Rank 2 failed: it ended with code -9"):
        run_ranks(_die, 3)


def test_a_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(RankError, match="this is old"):
        run_ranks(_warn, 1)

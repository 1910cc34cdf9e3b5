"""Tensors that training changes, on two processes: killed and resumed on two, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.plugins import Plugin
from tests.integration.test_forms import Changing, train_to_end
from tests.support.elastic import KillRank
from tests.support.ranks import RankError, run_ranks


def _train(rank: int, folder: Path, *plugins: Plugin) -> str:
    return train_to_end(folder, Changing(), 2, *plugins)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_training_makes_of_tensors_resumes_on_other_processes(
    num_processes: int, tmp_path: Path
) -> None:
    (whole,) = run_ranks(_train, 1, tmp_path / "whole")
    for iteration in (3, 5, 6):
        kill = KillRank("on_training_batch_start", iteration, rank=None)
        with pytest.raises(RankError, match="code -9"):
            run_ranks(_train, 2, tmp_path / "killed", kill)
    assert list((tmp_path / "killed").glob("*/*.pth"))
    found = run_ranks(_train, num_processes, tmp_path / "killed")
    assert found == [whole] * num_processes

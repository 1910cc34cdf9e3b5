"""Each kind of training data gives the same bits on any number of processes, also after kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helios.data import Steps
from tests.distributed.test_elastic import KillRank, run, run_to_end
from tests.support.elastic import Elastic, ElasticData, assert_same
from tests.support.ranks import RankError


class StepsData(ElasticData):
    """Epochs of four iterations without data."""

    def setup(self) -> None:
        super().setup()
        self._train_dataset = Steps(4)


def check(folder: Path, **more: Any) -> None:
    """Train undisturbed in one process, and killed in three and two, and compare all bits."""
    setting = Elastic(total_steps=7, options={"valid_frequency": 3}, **more)
    alone = run_to_end(folder / "alone", 1, setting)
    assert {replica for _, replica in alone.turns} == set(range(4))
    with pytest.raises(RankError, match="-9"):
        run(folder / "several", 3, setting, KillRank("on_backward_end", 3, 1))
    with pytest.raises(RankError, match="-9"):
        run(folder / "several", 1, setting, KillRank("on_training_batch_end", 6, None))
    assert_same(run_to_end(folder / "several", 2, setting), alone)


def test_without_data_processes_and_kills_change_no_bit(tmp_path: Path) -> None:
    check(tmp_path, make_data=StepsData)

"""Each kind of training data gives the same bits on any number of processes, also after kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import helios
from helios.data import Mixture, Packed, Steps
from tests.distributed.test_elastic import KillRank, run, run_to_end
from tests.support.elastic import Elastic, ElasticData, Pictures, assert_same
from tests.support.ranks import RankError


class StepsData(ElasticData):
    """Epochs of four iterations without data."""

    def setup(self) -> None:
        super().setup()
        self._train_dataset = Steps(4)


class MixtureData(ElasticData):
    """Two sources, of which the second is used up sooner."""

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        mixture = Mixture({"many": (Pictures(20), 2), "few": (Pictures(5), 1)})
        self._train_dataset = self._create_dataset(mixture, params)


class PackedPictures(Dataset[Any]):
    """The mean picture of each pack."""

    def __init__(self) -> None:
        self.packs = Packed([3, 9, 1, 0, 14, 2] * 5, 6)
        self.pictures = Pictures(30)
        self.fingerprint = self.packs.fingerprint

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        pictures = [self.pictures[piece.sample][1] for piece in self.packs[index]]
        return index, torch.stack(pictures).mean(0)


class PackedData(ElasticData):
    """A data set of packs."""

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(PackedPictures(), params)


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


def test_with_a_mixture_processes_and_kills_change_no_bit(tmp_path: Path) -> None:
    check(tmp_path, make_data=MixtureData)


@pytest.mark.full
def test_with_packs_processes_and_kills_change_no_bit(tmp_path: Path) -> None:
    check(tmp_path, make_data=PackedData)

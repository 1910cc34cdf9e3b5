"""Each kind of training data gives the same bits on any number of processes, also after kills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

import helios
from helios.data import Mixture, Packed, Steps, Stream
from tests.data.streams import NUM_SHARDS, PER_SHARD, Shards, read_rows
from tests.distributed.test_elastic import run, run_to_end
from tests.support.elastic import Elastic, ElasticData, KillRank, Pictures, assert_same
from tests.support.ranks import RankError

NUM_SAMPLES = NUM_SHARDS * PER_SHARD


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
    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(PackedPictures(), params)


def collate_pictures(samples: list[Any]) -> Any:
    """Return augmented pictures for what any of the streams yields."""
    ids = [int(sample["row"] if isinstance(sample, dict) else sample) for sample in samples]
    return default_collate([Pictures(NUM_SAMPLES)[number] for number in ids])


class StreamData(ElasticData):
    """A stream that yields numbers of pictures."""

    def __init__(self, setting: Elastic, make: Callable[[], Stream]) -> None:
        super().__init__(setting)
        self.make = make

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(
            batch_size=2, num_workers=self.setting.num_workers, collate_fn=collate_pictures
        )
        self._train_dataset = self._create_dataset(self.make(), params)


def as_it_is(number: int) -> int:
    return number


def make_rows() -> Stream:
    return Stream(partial(read_rows, make=as_it_is))


def make_shards() -> Stream:
    return Stream(Shards(make=as_it_is))


STREAMS: dict[str, Any] = {
    "rows": partial(StreamData, make=make_rows),
    "shards": partial(StreamData, make=make_shards),
}
MAPS: dict[str, Any] = {"steps": StepsData, "mixture": MixtureData, "packs": PackedData}


@pytest.mark.shows("P82")
@pytest.mark.parametrize(
    "kind", [*STREAMS, *(pytest.param(name, marks=pytest.mark.full) for name in MAPS)]
)
def test_processes_kills_and_workers_change_no_bit(tmp_path: Path, kind: str) -> None:
    """Three replicas share eight shards, so that their parts of a stream end one by one."""
    setting = Elastic(num_replicas=3, total_steps=7, make_data=(STREAMS | MAPS)[kind])
    alone = run_to_end(tmp_path / "alone", 1, setting)
    assert {replica for _, replica in alone.turns} == set(range(3))
    several, setting = tmp_path / "several", dataclasses.replace(setting, num_workers=1)
    with pytest.raises(RankError, match="-9"):
        run(several, 3, setting, KillRank("on_backward_end", 3, 1))
    with pytest.raises(RankError, match="-9"):
        run(several, 1, setting, KillRank("on_training_batch_end", 6, None))
    assert_same(run_to_end(several, 2, setting), alone)

"""Streams give the same bits on any number of processes, also after kills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import default_collate

import helios
from helios.data import Stream
from tests.data.streams import NUM_SHARDS, PER_SHARD, Shards, read_rows
from tests.distributed.test_elastic import run, run_to_end
from tests.support.elastic import Elastic, ElasticData, KillRank, Pictures, assert_same
from tests.support.ranks import RankError

NUM_SAMPLES = NUM_SHARDS * PER_SHARD


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


@pytest.mark.shows("P82")
@pytest.mark.parametrize("kind", STREAMS)
def test_processes_kills_and_workers_change_no_bit(tmp_path: Path, kind: str) -> None:
    """Three replicas share eight shards, so that their parts of a stream end one by one."""
    setting = Elastic(num_replicas=3, total_steps=7, make_data=STREAMS[kind])
    alone = run_to_end(tmp_path / "alone", 1, setting)
    assert {replica for _, replica in alone.turns} == set(range(3))
    several, setting = tmp_path / "several", dataclasses.replace(setting, num_workers=1)
    with pytest.raises(RankError, match="-9"):
        run(several, 3, setting, KillRank("on_backward_end", 3, 1))
    with pytest.raises(RankError, match="-9"):
        run(several, 1, setting, KillRank("on_training_batch_end", 6, None))
    assert_same(run_to_end(several, 2, setting), alone)

"""Each kind of training data gives the same bits on any number of processes, also after kills."""

from __future__ import annotations

import dataclasses
import importlib
import io
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

import helios
from helios.core import rng
from helios.data import Mixture, Packed, Steps, Stream
from tests.data.shards import Run, opener
from tests.data.streams import NUM_SHARDS, PER_SHARD, Shards, read_rows
from tests.distributed.test_elastic import run, run_to_end
from tests.support.elastic import Elastic, ElasticData, KillRank, Pictures, assert_same, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import digest
from tests.support.warned import collect_warnings

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
    """A data set of packs."""

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


@pytest.mark.shows("U34")
def test_samples_that_uneven_parts_leave_unused_are_those_of_all_processes(
    tmp_path: Path,
) -> None:
    setting = Elastic(num_replicas=3, total_steps=6, make_data=STREAMS["rows"])
    found = run_ranks(_train_and_collect, 2, tmp_path, setting)
    # Three and three and two shards: an epoch has five batches of two of each replica.
    text = "epoch 1 has left 10 samples of the others unused"
    assert sum(text in message for messages in found for message in messages) == 1


def _train_and_collect(rank: int, folder: Path, setting: Elastic) -> list[str]:
    with collect_warnings() as messages:
        train(folder, setting)
    return messages


def _make_table(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for row in range(PER_SHARD):
            yield {"row": shard * PER_SHARD + row}


def make_hugging_face() -> Stream:
    """Return a stream with a shuffle buffer."""
    datasets: Any = importlib.import_module("datasets")
    options = {"shards": list(range(NUM_SHARDS))}
    stream = datasets.IterableDataset.from_generator(_make_table, gen_kwargs=options)
    return Stream(stream.shuffle(seed=3, buffer_size=6))


def _write_tars(folder: Path) -> list[str]:
    found = [folder / f"{shard}.tar" for shard in range(NUM_SHARDS)]
    for shard, path in enumerate(found):
        with tarfile.open(path, "w") as tar:
            for row in range(PER_SHARD):
                number = str(shard * PER_SHARD + row).encode()
                info = tarfile.TarInfo(f"{number.decode()}.cls")
                info.size = len(number)
                tar.addfile(info, io.BytesIO(number))
    return list(map(str, found))


def _read_tars(index: int, count: int, tars: list[str]) -> Iterable[Any]:
    webdataset: Any = importlib.import_module("webdataset")
    chance = random.Random(random.getrandbits(64))
    own = webdataset.WebDataset(tars[index::count], shardshuffle=False, nodesplitter=iter)
    return own.shuffle(6, rng=chance).decode().map(_take_number)  # type: ignore[no-any-return]


def _take_number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def make_tars(tars: list[str]) -> Stream:
    return Stream(partial(_read_tars, tars=tars))


def make_stream(kind: str, folder: Path) -> Callable[[], Stream]:
    """Return what makes the stream of a library, which must be there, or of generators."""
    if kind == "rows":
        return make_rows
    pytest.importorskip(kind)
    return make_hugging_face if kind == "datasets" else partial(make_tars, _write_tars(folder))


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 3 worker",
    "ignore:unclosed file:ResourceWarning",  # webdataset leaves its files to Python
)
@pytest.mark.parametrize("kind", ["rows", "datasets", "webdataset"])
def test_streams_of_libraries_depend_on_neither_processes_nor_workers(
    tmp_path: Path, kind: str
) -> None:
    rng.seed_rngs(0)
    make = make_stream(kind, tmp_path)

    def walk(num_processes: int, num_workers: int, epoch: int, **place: int) -> list[str]:
        options = {"batch_size": 2, "collate_fn": collate_pictures, "num_workers": num_workers}
        turns = Run(opener(make(), **options), num_processes, 4).walk(epoch, **place)
        return [digest(turn) for turn in turns]

    with rng.numpy_global_kept():
        alone = [walk(1, 0, epoch) for epoch in range(2)]
        assert len({*alone[0], *alone[1]}) == len(alone[0]) + len(alone[1]) == 10
        for num_processes in range(1, 5):
            for num_workers in (0, 1, 3):
                assert walk(num_processes, num_workers, 0) == alone[0]
                tail = walk(num_processes, num_workers, 1, batch=3, sample=3 * 2 * 4)
                assert tail == alone[1][3:]

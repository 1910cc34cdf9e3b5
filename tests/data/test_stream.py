"""Streams: each replica reads a part of its own, the same in any process and worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helios.data import Stream
from helios.data.external_loader import try_state
from helios.data.source import NO_BATCH
from helios.data.stream import StreamSource
from helios.errors import ArgumentError
from tests.data.datasets import collate_noisily
from tests.data.shards import Run, opener
from tests.data.streams import NUM_SHARDS, PER_SHARD, Shards, make_sample, read_rows, shuffle_rows

NUM_SAMPLES = NUM_SHARDS * PER_SHARD
SIZE = 3


def make_run(
    source: Any, num_processes: int = 1, num_replicas: int = 4, *, pads: bool = True, **options: Any
) -> Run:
    options = {"batch_size": SIZE, "collate_fn": collate_noisily, **options}
    open_one = opener(Stream(source), num_replicas=num_replicas, **options)
    return Run(open_one, num_processes, num_replicas, pads=pads)


def plain(turns: list[list[Any]]) -> list[list[Any]]:
    return [[None if b is NO_BATCH else b.tolist() for b in turn] for turn in turns]


def ids_of(turns: list[list[Any]]) -> list[int]:
    return [int(row[0]) for turn in turns for batch in turn if batch is not None for row in batch]


SOURCES: dict[str, Any] = {
    "rows": read_rows,
    "shuffled": shuffle_rows,
    "state": Shards(),
    "buffer": Shards(buffer_size=4),
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Any:
    return SOURCES[request.param]


@pytest.mark.shows("P82")
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_each_sample_is_read_once_and_each_epoch_has_another_order(
    source: Any, num_replicas: int
) -> None:
    run = make_run(source, 1, num_replicas)
    epochs = [plain(run.walk(epoch)) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(ids_of(epoch)) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1]
    assert ids_of(epochs[0]) != ids_of(epochs[1])
    assert run.told[-1] == (num_replicas * SIZE, True)


@pytest.mark.shows("P82")
@pytest.mark.parametrize(("buffer_size", "verdict"), [(0, True), (4, False)])
def test_the_state_of_a_part_is_tried(buffer_size: int, verdict: bool | None) -> None:
    (stream,) = make_run(Shards(buffer_size=buffer_size), num_workers=2).sources
    assert isinstance(stream, StreamSource)
    assert stream.find_stateful() == "Shards"
    assert try_state(stream.for_trial()) is verdict
    (rows,) = make_run(read_rows).sources
    assert isinstance(rows, StreamSource)
    assert not rows.find_stateful()


def make_uneven(index: int, count: int) -> Iterator[torch.Tensor]:
    for number in range(4 + 3 * index):
        yield make_sample(100 * index + number)


@pytest.mark.parametrize(("drop_last", "lengths"), [(False, [3, 1]), (True, [3])])
def test_an_epoch_ends_with_the_shortest_part(drop_last: bool, lengths: list[int]) -> None:
    turns = plain(make_run(make_uneven, 1, 2, drop_last=drop_last).walk(0))
    assert [len(turn[0]) for turn in turns] == lengths
    assert [len(turn[1]) for turn in turns] == [3] * len(lengths)


def test_an_evaluation_reads_every_sample() -> None:
    turns = plain(make_run(make_uneven, 1, 3, pads=False).walk(0))
    assert sorted(ids_of(turns)) == [*range(4), *range(100, 107), *range(200, 210)]
    assert turns[-1][:2] == [None, None]


@pytest.mark.shows("P82")
def test_fewer_shards_than_replicas_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"at least one batch.*reduce num_replicas"):
        make_run(Shards(), 1, 9).walk(0)

    def read_few(index: int, count: int) -> Iterator[int]:
        yield from ([], [1])[index == 0]

    with pytest.raises(ArgumentError, match=r"at least one batch.*reduce num_replicas"):
        make_run(read_few, 1, 2, collate_fn=None).walk(0)

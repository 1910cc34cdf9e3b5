"""Sources of our loaders: the same batches from any place, fetched by whatever process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import Shard, Source
from helios.errors import UsageError
from helios.storage.content_hash import fingerprint
from tests.data.datasets import (
    FETCH,
    Augmented,
    Indices,
    Lone,
    walk,
)

LENGTH = 11


def open_with(dataset: Any, **options: Any) -> Source:
    loader, sampler = create_dataloader(dataset, **options)
    return open_source(loader, sampler, run_seed=6691, purpose=FETCH)


class Failing(Indices):
    """Raises at its third sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__(6)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_from_the_data_set_does_not_end_the_epoch(num_workers: int) -> None:
    source = open_with(Failing(StopIteration()), num_workers=num_workers)
    with pytest.raises(UsageError, match="must not raise StopIteration, but did in batch 2"):
        walk(source, 0)


@pytest.mark.shows("R47")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_worker_is_left_on_any_way_out(is_persistent: bool) -> None:
    how = {"num_workers": 1, "persistent_workers": is_persistent}
    source = open_with(Failing(ZeroDivisionError()), **how)
    batches = Lone(source.batches(0))
    next(batches)
    workers = multiprocessing.active_children()
    batches.close()
    batches.close()
    assert multiprocessing.active_children() == (workers if is_persistent else [])
    assert len(workers) == 1
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(ZeroDivisionError):
        walk(source, 0)
    assert walk(source, 1, batch=3, sample=3) == [3, 4, 5]
    assert multiprocessing.active_children() == (workers if is_persistent else [])
    source.close()
    source.close()
    assert multiprocessing.active_children() == []


@pytest.mark.shows("P70")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_are_read_where_they_are_fetched_with_equal_results(num_replicas: int) -> None:
    found = []
    for num_workers in (0, 2):
        loader, sampler = create_dataloader(
            Augmented(LENGTH), batch_size=2, shuffle=True, num_workers=num_workers
        )
        share = Shard(num_replicas, range(num_replicas), pads=True)
        source = open_source(loader, sampler, run_seed=3, purpose=FETCH, share=share)
        batches = source.batches(0, reads_content=True)
        hashes = []
        for batch in batches:
            contents = batches.contents
            assert contents is not None
            hashes.append([each.fingerprint for each in contents])
            assert hashes[-1] == [fingerprint(each) for each in batch]
        found.append(hashes)
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) == len(found[0]) > 1


_ROWS = torch.arange(24.0).reshape(6, 2, 2)


@pytest.mark.parametrize(
    "tensor",
    [_ROWS, _ROWS.transpose(1, 2), _ROWS[:, 0, 0], _ROWS.bfloat16()],
    ids=["whole", "transposed", "scalars", "bf16"],
)
def test_rows_of_tensors_are_those_that_are_fetched_one_by_one(tensor: Tensor) -> None:
    dataset, order = TensorDataset(tensor, _ROWS), [[4, 2], [0, 5], [1, -1]]
    source = open_with(dataset, batch_sampler=order)
    for indices, batch in zip(order, walk(source, 0), strict=True):
        expected = default_collate([dataset[index] for index in indices])
        assert [fingerprint([each]) for each in batch] == [fingerprint([x]) for x in expected]
        assert [each.stride() for each in batch] == [each.stride() for each in expected]

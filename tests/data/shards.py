"""Shared data as all processes of a run see it, and what PyTorch's rule says that they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import LONE, NO_BATCH, Shard, Source
from helios.replicas.reduction_tree import blocks
from tests.data.datasets import FETCH, Lone, join

Opener = Callable[[Shard], Source]
Turns = list[list[Any]]

SPLITS = [(p, v) for v in range(1, 7) for p in range(1, v + 1)]
"""Every number of processes for every number of replicas."""


def opener(dataset: Any, *, run_seed: int = 6691, **options: Any) -> Opener:
    """Return what opens new sources over a data set; a function as sampler is called for each."""

    def open_one(share: Shard) -> Source:
        made = {
            name: value() if name in ("sampler", "batch_sampler") and callable(value) else value
            for name, value in options.items()
        }
        loader, sampler = create_dataloader(dataset, **made)
        return open_source(loader, sampler, run_seed=run_seed, purpose=FETCH, share=share)

    return open_one


def plain(batch: Any) -> Any:
    """Return a batch in plain values."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def order_of(length: int, epoch: int = 0, **options: Any) -> list[int]:
    """Return the order of an epoch as one replica without a share sees it."""
    source = opener(range(length), batch_size=None, **options)(LONE)
    return [plain(item) for item in Lone(source.batches(epoch))]


class Run:
    """All processes of a run, each with its own source, walked one after the other.

    Args:
        open_one: opens the source of a share.
        num_processes: P.
        num_replicas: V.
        pads: whether it is training data.
    """

    def __init__(
        self, open_one: Opener, num_processes: int, num_replicas: int, *, pads: bool = True
    ) -> None:
        self.shares = [
            Shard(num_replicas, block, pads) for block in blocks(num_processes, num_replicas)
        ]
        self.sources = [open_one(share) for share in self.shares]
        self.told: list[tuple[int, bool]] = []

    def walk(
        self, epoch: int = 0, *, batch: int = 0, sample: int = 0, limit: int | None = None
    ) -> Turns:
        """Return the batches of all replicas in each iteration of a pass, from a place on.

        ``told`` then holds the number of samples and "is the last" of each, the same for all.
        """
        columns, told = [], []
        for share, source in zip(self.shares, self.sources, strict=True):
            batches = source.batches(epoch, batch=batch, sample=sample)
            found, said = [], []
            for item in batches:
                assert len(item) == len(share.block)
                found.append(item)
                said.append((batches.num_samples, batches.is_last))
                if len(found) == limit:
                    break
            batches.close()
            columns.append(found)
            told.append(said)
        assert all(said == told[0] for said in told)
        self.told = told[0]
        return [join(row) for row in zip(*columns, strict=True)]

    def indices(self, epoch: int = 0, **place: int) -> Turns:
        """Return the indices of all replicas in each iteration of a pass, as plain values."""
        return [list(map(plain, turn)) for turn in self.walk(epoch, **place)]

    def close(self) -> None:
        """End persistent workers."""
        for source in self.sources:
            source.close()


def dealt(
    order: Sequence[Any],
    num_replicas: int,
    size: int,
    *,
    drop_last: bool = False,
    cuts: bool | None = None,
) -> Turns:
    """Return what loaders with PyTorch's sampler of shares would give, turn by turn."""
    cuts = drop_last if cuts is None else cuts
    if cuts and len(order) < num_replicas:
        return []
    replicas = []
    for rank in range(num_replicas):
        places = DistributedSampler(order, num_replicas, rank, shuffle=False, drop_last=cuts)
        share = [order[place] for place in places]
        found = [share[i : i + size] for i in range(0, len(share), size)]
        replicas.append([batch for batch in found if len(batch) == size or not drop_last])
    return [list(turn) for turn in zip(*replicas, strict=True)]


def dealt_once(
    order: Sequence[Any], num_replicas: int, size: int, *, drop_last: bool = False
) -> Turns:
    """Return what replicas get where nothing is padded or cut, turn by turn."""
    replicas = []
    for rank in range(num_replicas):
        share = list(order[rank::num_replicas])
        found = [share[i : i + size] for i in range(0, len(share), size)]
        replicas.append([batch for batch in found if len(batch) == size or not drop_last])
    longest = max(map(len, replicas))
    filled = [found + [NO_BATCH] * (longest - len(found)) for found in replicas]
    return [list(turn) for turn in zip(*filled, strict=True)]

"""Small streams that show what was read: their samples carry ids and numbers of all generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.data.datasets import draw

NUM_SHARDS, PER_SHARD = 8, 5


def make_sample(number: int) -> torch.Tensor:
    """Return an id and numbers of all generators."""
    return torch.tensor([number, *draw()], dtype=torch.float64)


def read_rows(index: int, count: int, make: Callable[[int], Any] = make_sample) -> Iterator[Any]:
    """Return a part as a generator, whose shards and buffer are shuffled."""
    shards = list(range(NUM_SHARDS))[index::count]
    random.shuffle(shards)
    buffer: list[int] = []
    for shard in shards:
        for number in range(PER_SHARD):
            buffer.append(shard * PER_SHARD + number)
            if len(buffer) > 3:
                yield make(buffer.pop(random.randrange(len(buffer))))
    for number in buffer:
        yield make(number)


def shuffle_rows(index: int, count: int) -> Iterator[Any]:
    """Return a part that is shuffled when it is opened."""
    own = list(range(NUM_SHARDS * PER_SHARD))[index::count]
    random.shuffle(own)
    return map(make_sample, own)


class Shards(IterableDataset[Any]):
    """A stream with the protocol of Hugging Face's, also in loader workers.

    Args:
        shards: its shards.
        buffer_size: size of a shuffle buffer that is not in its state.
        make: makes a sample from its id.
    """

    def __init__(
        self,
        shards: list[int] | None = None,
        buffer_size: int = 0,
        make: Callable[[int], Any] = make_sample,
    ) -> None:
        self.make = make
        self.shards = list(range(NUM_SHARDS)) if shards is None else shards
        self.buffer_size = buffer_size
        self.epoch = 0
        self.position = 0

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards], self.buffer_size, self.make)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        own = self.shards if info is None else self.shards[info.id :: info.num_workers]
        chance = random.Random(self.epoch)
        numbers = [shard * PER_SHARD + row for shard in own for row in range(PER_SHARD)]
        chance.shuffle(numbers)
        buffer: list[int] = []
        while self.position < len(numbers):
            buffer.append(numbers[self.position])
            self.position += 1
            if len(buffer) > self.buffer_size:
                yield self.make(buffer.pop(chance.randrange(len(buffer))))
        for number in buffer:
            yield self.make(number)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position, self.epoch = state_dict["position"], state_dict["epoch"]

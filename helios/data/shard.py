"""The part of the data that a process fetches.

A run is defined over V replicas, and a process runs some of them. The assignment affects only which
process fetches a batch.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Final

from helios.errors import ArgumentError

__all__ = ["LONE", "NO_BATCH", "NoBatch", "Shard"]


class NoBatch(Enum):
    """The type of :data:`NO_BATCH`."""

    NO_BATCH = "NO_BATCH"


NO_BATCH: Final = NoBatch.NO_BATCH
"""The batch of a replica that has none in the last iteration of an evaluation."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of the data that one process fetches.

    Attributes:
        num_replicas: V, the replicas of the run.
        block: the replicas of this process.
        pads: whether all replicas get the same number of samples, by padding or truncating the
            end as PyTorch's ``DistributedSampler`` does (training). Otherwise each sample occurs
            once, and replicas may have a shorter batch or none in the last iteration (evaluation).

    Raises:
        ArgumentError: if the number is less than one, or the block is not a range of replicas.

    Example:
        >>> Shard(num_replicas=4, block=range(2, 4), pads=True).block
        range(2, 4)
    """

    num_replicas: int
    block: range
    pads: bool

    def __post_init__(self) -> None:
        if type(self.num_replicas) is not int or self.num_replicas < 1:
            raise ArgumentError(
                f"Shard(num_replicas=...) must be a positive int, got {self.num_replicas!r}. Pass "
                "the number of replicas of the run."
            )
        block = self.block
        is_range = isinstance(block, range) and len(block) > 0 and block.step > 0
        if not is_range or block[0] < 0 or block[-1] >= self.num_replicas:
            raise ArgumentError(
                f"Shard(block=...) must be a range of replicas from 0 to {self.num_replicas - 1}, "
                f"got {block!r}. Pass the replicas of this process."
            )
        if not isinstance(self.pads, bool):
            raise ArgumentError(
                f"Shard(pads=...) must be True or False, got {self.pads!r}. Pass True for "
                "training, False for evaluation."
            )


LONE: Final = Shard(num_replicas=1, block=range(1), pads=True)
"""The shard of a run with one replica: all data."""

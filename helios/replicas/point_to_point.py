"""Sends tensors to single processes of the run and receives tensors from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, final

import torch.distributed as dist
from torch import Tensor

Part: TypeAlias = tuple[Tensor, int]
"""A tensor, and the rank to send it to or receive it from."""


@final
class Transfer:
    """Tensors that are being sent and received.

    Args:
        works: the pending operations.
    """

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Wait until all operations are complete."""
        for work in filter(None, self._works):
            work.wait()


@final
class PointToPoint:
    """The processes of the run, by their ranks in the group, as seen from one of them.

    Args:
        num_processes: number of processes.
        rank: number of this process in the group, from 0.
        group: the process group; ``None`` for that of all processes.

    Attributes:
        rank: as given.
        others: all ranks but this one.
        group: as given.
    """

    def __init__(self, num_processes: int, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.others = [other for other in range(num_processes) if other != rank]
        self.group = group

    def start(self, sends: Iterable[Part], receives: Iterable[Part]) -> Transfer:
        """Begin to send and to receive tensors, each to or from a rank.

        Several tensors between the same two ranks arrive in the order of the lists.
        """
        # Receives first: a tensor that arrives before its receive is copied once more.
        plans = ((dist.irecv, receives), (dist.isend, sends))
        parts = [
            (operation, tensor, self._peer(rank))
            for operation, messages in plans
            for tensor, rank in messages
            if tensor.numel()
        ]
        if all(tensor.device.type == "cpu" for _, tensor, _ in parts):
            return Transfer(
                operation(tensor, peer, self.group) for operation, tensor, peer in parts
            )
        # On accelerators, ranks that all wait to send would deadlock.
        return Transfer(dist.batch_isend_irecv([dist.P2POp(*part, self.group) for part in parts]))

    def exchange(self, sends: Iterable[Part], receives: Iterable[Part]) -> None:
        """Send and receive tensors, and wait until all operations are complete."""
        self.start(sends, receives).wait()

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks."""
        if not self.others:
            return [value]
        values = [None] * (len(self.others) + 1)
        dist.all_gather_object(values, value, group=self.group)
        return values

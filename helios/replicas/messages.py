"""Sends tensors between single processes, and messages in the rounds of a sum, which cost none.

2^k processes send to partners at distances 1, 2, 4, ...: each time every process forwards
everything that it has received, so the number of receivers doubles. Otherwise each process sends to
all others. ``tree_reducer`` adds the gradients in the same rounds, so that a message needs no extra
ones.
"""

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


@final
class Message:
    """A row of numbers from each process to all others, and bytes from rank 0 to all others.

    Args:
        ranks: the processes of the group that the message is sent in.
        row: what this process sends; 1-D, of the same length on all processes.
        content: on rank 0 what it sends; on the others the buffer for it, of the same size.

    Attributes:
        rows: what each process sends; complete after the last round.
        content: as given; that of rank 0 after the last round.
    """

    def __init__(self, ranks: PointToPoint, row: Tensor, content: Tensor) -> None:
        self._ranks = ranks
        self.content = content
        self.rows = row.new_empty((len(ranks.others) + 1, len(row)))
        self.rows[ranks.rank] = row

    def send_over(self, distance: int) -> Transfer:
        """Begin the round with the partner at a distance, a power of two; nearest first."""
        rank = self._ranks.rank
        partner = rank ^ distance
        known, missing = (place // distance * distance for place in (rank, partner))
        sends = [(self.rows[known : known + distance], partner)]
        receives = [(self.rows[missing : missing + distance], partner)]
        if rank < distance:
            sends.append((self.content, partner))
        elif rank < 2 * distance:
            receives.append((self.content, partner))
        return self._ranks.start(sends, receives)

    def send_to_all(self) -> Transfer:
        """Begin the only round, for a number of processes that is not a power of two."""
        ranks = self._ranks
        sends = [(self.rows[ranks.rank], other) for other in ranks.others]
        receives = [(self.rows[other], other) for other in ranks.others]
        if ranks.rank == 0:
            sends += ((self.content, other) for other in ranks.others)
        else:
            receives.append((self.content, 0))
        return ranks.start(sends, receives)

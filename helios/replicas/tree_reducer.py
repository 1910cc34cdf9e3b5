"""Sums tensors over all replicas of a run, bit for bit the same on any number of processes.

Each process provides the sums of the subtrees of its block (``reduction_tree``); the rest of the
tree is added over processes. Their number decides which messages are sent, but not the order in
which an element is added. A single process does not use ``torch.distributed``.

2^k processes send to partners at distances 1, 2, 4, ...: each time every process passes on what it
has received so far, and twice as many know it. Otherwise each process sends to all others at once.
A message goes in the rounds of a sum, and so costs none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from helios.errors import UsageError
from helios.replicas.reduction_tree import block_of, blocks, finish, is_power_of_two, subtrees

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


# Measured with scripts/bench/reduce.py over gloo, on 2 and 4 ranks: up to these sizes sending whole
# parts is faster than sending halves, to any partner and to the last one.
_WHOLE_BYTES = 2**19
_LAST_WHOLE_BYTES = 2**23


def _as_real(tensor: Tensor) -> Tensor:
    """Return a view as real numbers: backends do not send complex ones, and sums are the same."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _halving_distances(num_processes: int) -> list[int] | None:
    """Return the distances of partners whose sums are nodes of the tree, nearest first.

    ``None`` unless the number of processes is a power of two, where each block is one subtree.
    """
    if not is_power_of_two(num_processes):
        return None
    return [1 << level for level in range(num_processes.bit_length() - 1)]


class TreeReducer:
    """Adds large tensors of all replicas, in the order of the tree.

    With 2^k processes it adds by recursive halving and doubling, nearest rank first, because each
    of their blocks is one subtree. Otherwise each process finishes one chunk, which the others
    send to it. Buffers for received tensors are kept between calls.

    Args:
        num_replicas: leaves of the tree.
        num_processes: processes that run them.
        rank: number of this process in the group, from 0.
        group: the process group; ``None`` for that of all processes.

    Attributes:
        block: the replicas of this process.
        nodes: the subtrees of this process, in their order.
        has_others: whether there are other processes.

    Raises:
        ArgumentError: unless 0 <= rank < num_processes <= num_replicas.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_processes: int = 1,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.block = block_of(rank, num_processes, num_replicas)
        self._num_replicas = num_replicas
        self._rank = rank
        self._nodes = [subtrees(b, num_replicas) for b in blocks(num_processes, num_replicas)]
        self.nodes = self._nodes[rank]
        self._distances = _halving_distances(num_processes)
        self._ranks = PointToPoint(num_processes, rank, group)
        self.has_others = bool(self._ranks.others)
        self._whole_bytes = (_WHOLE_BYTES, _LAST_WHOLE_BYTES)
        self._received: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._message: Message | None = None

    def attach(self, message: Message) -> None:
        """Send a message with the next sum. All processes attach one at the same point."""
        self._message = message

    def deliver(self) -> None:
        """Send the attached message by itself, unless a sum has sent it already."""
        message = self._take_message()
        if message is None:
            return
        if self._distances is None:
            message.send_to_all().wait()
            return
        for distance in self._distances:
            message.send_over(distance).wait()

    def _take_message(self) -> Message | None:
        message, self._message = self._message, None
        return message

    def all_reduce(self, sums: Mapping[range, Tensor]) -> Tensor:
        """Return the sum over all replicas. All processes call it with tensors of one size.

        Args:
            sums: the 1-D contiguous sum of each of ``nodes``; all are overwritten.

        Returns:
            The first node's tensor, which holds the sum.
        """
        tensors = [sums[node] for node in self.nodes]
        if self.has_others and tensors[0].numel():
            with torch.no_grad():
                parts = [_as_real(tensor) for tensor in tensors]
                if self._distances is None:
                    self._send_chunks(parts)
                else:
                    self._halve_and_double(parts[0], self._distances)
        return tensors[0]

    def _reserve(self, like: Tensor, size: int) -> Tensor:
        """Return a receive buffer, the same at each call."""
        kind = (like.dtype, like.device)
        if kind not in self._received or self._received[kind].numel() < size:
            self._received[kind] = like.new_empty(size)
        return self._received[kind]

    def _halve_and_double(self, own: Tensor, distances: Sequence[int]) -> None:
        """Add half of what is left with each partner, then send back the finished parts.

        Both partners exchange and add small parts as a whole, because fewer messages are faster.
        With the last partner this sends no more bytes, so the limit is higher there.
        """
        part, halves, message = own, [], self._take_message()
        for distance in distances:
            partner = self._rank ^ distance
            is_left, is_last = self._rank < partner, distance == distances[-1]
            mine = theirs = part
            if part.nbytes > self._whole_bytes[is_last]:
                middle = (part.numel() + 1) // 2
                left, right = part[:middle], part[middle:]
                mine, theirs = (left, right) if is_left else (right, left)
                halves.append((mine, theirs, partner))
            incoming = self._reserve(mine, mine.numel())[: mine.numel()]
            carried = None if message is None else message.send_over(distance)
            self._ranks.exchange([(theirs, partner)], [(incoming, partner)])
            if carried is not None:
                carried.wait()
            left, right = (mine, incoming) if is_left else (incoming, mine)
            torch.add(left, right, out=mine)
            part = mine
        for mine, theirs, partner in reversed(halves):
            self._ranks.exchange([(mine, partner)], [(theirs, partner)])

    def _send_chunks(self, own: Sequence[Tensor]) -> None:
        """Send the chunks of other processes, add the own one and gather the results."""
        total, size = own[0], own[0].numel()
        count = len(self._nodes)
        chunks = [slice(size * r // count, size * (r + 1) // count) for r in range(count)]
        mine, others = chunks[self._rank], self._ranks.others
        finished = total[mine]
        nodes: dict[range, Tensor] = {}
        receives = []
        for rank, node, part in self._cut_room(finished):
            nodes[node] = part
            receives.append((part, rank))
        sends = [(tensor[chunks[rank]], rank) for rank in others for tensor in own]
        message = self._take_message()
        carried = None if message is None else message.send_to_all()
        self._ranks.exchange(sends, receives)
        if carried is not None:
            carried.wait()
        nodes.update(zip(self.nodes, (tensor[mine] for tensor in own), strict=True))
        finished.copy_(finish(nodes, self._num_replicas))
        self._ranks.exchange(
            [(finished, rank) for rank in others], [(total[chunks[rank]], rank) for rank in others]
        )

    def _cut_room(self, chunk: Tensor) -> list[tuple[int, range, Tensor]]:
        """Return receive buffers for a chunk of every node of every other process."""
        places = [(rank, node) for rank in self._ranks.others for node in self._nodes[rank]]
        size = chunk.numel()
        room = self._reserve(chunk, size * len(places))
        return [
            (rank, node, room[size * place : size * (place + 1)])
            for place, (rank, node) in enumerate(places)
        ]

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Check that a description is the same on all processes. All of them call it.

        Sizes that differ between processes make a backend hang, abort the process, or return wrong
        numbers, so call this before the first exchange.

        Raises:
            UsageError: on all processes, if the description of one differs from that of rank 0.
        """
        first, *others = self._ranks.gather_objects(list(lines))
        for rank, found in enumerate(others, 1):
            if found != first:
                raise UsageError(_describe_difference(what, rank, found, first))


def _describe_difference(what: str, rank: int, found: list[str], first: list[str]) -> str:
    length = max(len(found), len(first))
    padded = ([*lines, *["nothing"] * (length - len(lines))] for lines in (found, first))
    here, there = next(pair for pair in zip(*padded, strict=True) if pair[0] != pair[1])
    return (
        f"All processes must have the same {what}, but rank {rank} has {here} where rank 0 has "
        f"{there}. Build the model from values that are the same on all processes."
    )

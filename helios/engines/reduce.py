"""Sums over all replicas of a run that are equal bit for bit on any number of processes (R3).

Each process brings the sums of the subtrees of its block (``tree.py``); here the rest of the tree
is added over processes. What is exchanged depends on their number, the order of additions of an
element does not. Without other processes nothing here touches ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helios.engines.assignment import block_of, blocks, is_power_of_two
from helios.engines.tree import finish, subtrees, tree_sum
from helios.errors import UsageError

_Message = tuple[Tensor, int]
_Scores = dict[str, tuple[float, float]]

# Measured with scripts/bench/reduce.py over gloo, on 2 and 4 ranks: up to here whole parts are
# faster than halves, with any partner and with the last one.
_WHOLE_BYTES = 2**19
_LAST_WHOLE_BYTES = 2**23


def _as_real(tensor: Tensor) -> Tensor:
    """Return a view in real numbers: backends send no complex ones; sums are the same."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _halving_distances(num_processes: int) -> list[int] | None:
    """Return the distances of partners whose sums are nodes of the tree, nearest first.

    ``None`` unless the number of processes is a power of two, where each block is one subtree.
    """
    if not is_power_of_two(num_processes):
        return None
    return [1 << level for level in range(num_processes.bit_length() - 1)]


class _Ranks:
    """This process among those of the run, by their ranks in the group."""

    def __init__(self, num_processes: int, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.others = [other for other in range(num_processes) if other != rank]
        self.group = group

    def exchange(self, sends: Iterable[_Message], receives: Iterable[_Message]) -> None:
        """Send and receive tensors, each to or from a rank; returns when all are there.

        Several tensors between the same two ranks arrive in the order of the lists.
        """
        # Receives first: what arrives before its receive is copied once more.
        plans = ((dist.irecv, receives), (dist.isend, sends))
        parts = [
            (operation, tensor, self._peer(rank))
            for operation, messages in plans
            for tensor, rank in messages
            if tensor.numel()
        ]
        if all(tensor.device.type == "cpu" for _, tensor, _ in parts):
            works = [operation(tensor, peer, self.group) for operation, tensor, peer in parts]
        else:  # On accelerators, ranks that all wait to send would wait for ever.
            works = [*dist.batch_isend_irecv([dist.P2POp(*part, self.group) for part in parts])]
        for work in filter(None, works):
            work.wait()

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks."""
        if not self.others:
            return [value]
        values = [None] * (len(self.others) + 1)
        dist.all_gather_object(values, value, group=self.group)
        return values


class TreeReducer:
    """Adds large tensors of all replicas, in the order of the tree.

    Two to the k processes add by recursive halving and doubling, nearest rank first, since each
    of their blocks is one subtree. Others send chunks to the process that finishes them. Buffers
    for what comes in are kept between calls.

    Args:
        num_replicas: leaves of the tree.
        num_processes: processes that carry them.
        rank: number of this process in the group, from 0.
        group: the process group; ``None`` for that of all processes.

    Attributes:
        block: the replicas of this process.
        nodes: the subtrees of this process, in their order.

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
        self._ranks = _Ranks(num_processes, rank, group)
        self._whole_bytes = (_WHOLE_BYTES, _LAST_WHOLE_BYTES)
        self._received: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def all_reduce(self, sums: Mapping[range, Tensor]) -> Tensor:
        """Return the sum over all replicas; all processes call it with tensors of one size.

        Args:
            sums: the sum of each of ``nodes``, contiguous, of one dimension; all are overwritten.

        Returns:
            The first node's tensor, which holds the sum.

        Raises:
            UsageError: if these are not tensors of one size and type, one for each of ``nodes``.
        """
        tensors = [sums[node] for node in self.nodes if node in sums]
        kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
        if sums.keys() != set(self.nodes) or len(kinds) > 1 or tensors[0].dim() != 1:
            raise UsageError(
                f"The sums of {self.nodes} must be tensors of one dimension, size and type, got "
                f"{ {node: (tuple(t.shape), t.dtype) for node, t in sums.items()} }. Pass what "
                "TreeStack.take() returns."
            )
        if self._ranks.others and tensors[0].numel():
            with torch.no_grad():
                parts = [_as_real(tensor) for tensor in tensors]
                if self._distances is None:
                    self._send_chunks(parts)
                else:
                    self._halve_and_double(parts[0], self._distances)
        return tensors[0]

    def _reserve(self, like: Tensor, size: int) -> Tensor:
        """Return room for what comes in, the same at each call."""
        kind = (like.dtype, like.device)
        if kind not in self._received or self._received[kind].numel() < size:
            self._received[kind] = like.new_empty(size)
        return self._received[kind]

    def _halve_and_double(self, own: Tensor, distances: Sequence[int]) -> None:
        """Add half of what is left with each partner, then give back the finished parts.

        A small part is exchanged and added as a whole by both: the fewer messages win. With the
        last partner that costs no more bytes, so the limit is higher there.
        """
        part, halves = own, []
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
            self._ranks.exchange([(theirs, partner)], [(incoming, partner)])
            left, right = (mine, incoming) if is_left else (incoming, mine)
            torch.add(left, right, out=mine)
            part = mine
        for mine, theirs, partner in reversed(halves):
            self._ranks.exchange([(mine, partner)], [(theirs, partner)])

    def _send_chunks(self, own: Sequence[Tensor]) -> None:
        """Send each process its chunk of all nodes, finish the own one, and gather the results."""
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
        self._ranks.exchange(sends, receives)
        nodes.update(zip(self.nodes, (tensor[mine] for tensor in own), strict=True))
        finished.copy_(finish(nodes, self._num_replicas))
        self._ranks.exchange(
            [(finished, rank) for rank in others], [(total[chunks[rank]], rank) for rank in others]
        )

    def _cut_room(self, chunk: Tensor) -> list[tuple[int, range, Tensor]]:
        """Return room for a chunk of every node of every other process."""
        places = [(rank, node) for rank in self._ranks.others for node in self._nodes[rank]]
        size = chunk.numel()
        room = self._reserve(chunk, size * len(places))
        return [
            (rank, node, room[size * place : size * (place + 1)])
            for place, (rank, node) in enumerate(places)
        ]

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Check that a description is the same on all processes; all of them call it.

        Sizes that differ between processes make a backend hang, end the process, or give wrong
        numbers, so this is asked before the first exchange.

        Raises:
            UsageError: if a process has another description than rank 0; the same on all.
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
        f"{there}. Build the model from nothing that differs between processes."
    )


def _add_scores(left: _Scores, right: _Scores) -> _Scores:
    """Return sums and weights by name; a name that one side lacks keeps those of the other."""
    total = dict(left)
    for name, (value, weight) in right.items():
        known = total.get(name)
        total[name] = (value, weight) if known is None else (known[0] + value, known[1] + weight)
    return total


class NumberReducer:
    """Adds a few numbers of each replica, by name, in the order of the tree.

    The names are known from the last call, so a call is one small exchange as long as no process
    has a new one. Use one object for each kind of table.

    Args:
        num_replicas: leaves of the tree.
        num_processes: processes that carry them.
        rank: number of this process in the group, from 0.
        group: the process group; ``None`` for that of all processes.
        device: where the group's backend wants tensors.

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
        device: torch.device | str = "cpu",
    ) -> None:
        self._block = block_of(rank, num_processes, num_replicas)
        self._sizes = [len(block) for block in blocks(num_processes, num_replicas)]
        self._ranks = _Ranks(num_processes, rank, group)
        self._device = device
        self._names: list[str] = []

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all replicas in their order, exactly.

        Args:
            rows: one row for each replica of this process; as long on all processes.
        """
        if not self._ranks.others:
            return rows
        longest = max(self._sizes)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(found, padded, group=self._ranks.group)
        return torch.cat([part[:size] for part, size in zip(found, self._sizes, strict=True)])

    def sum_scores(
        self, tables: Sequence[Mapping[str, tuple[Any, Any]]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and weight of each name over all replicas, in the order of names.

        Args:
            tables: ``{name: (sum, weight)}`` of each replica of this process, in order. A replica
                may lack a name.

        Raises:
            UsageError: unless there is one table for each replica.
        """
        if len(tables) != len(self._block):
            raise UsageError(
                f"There must be one table for each of the {len(self._block)} replicas of this "
                f"process, got {len(tables)}. Pass an empty one for a replica without scores."
            )
        sums = tree_sum(self._exchange(tables), _add_scores)
        return {name: sums[name] for name in sorted(sums)}

    def mean_losses(self, tables: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the mean of each name over the replicas that have it, in the order of names.

        Args:
            tables: losses of each replica of this process by name: numbers, or tensors of one
                element.

        Returns:
            Tensors without dimensions, of torch's default type, summed in float64.
        """
        pairs = [{name: (loss, 1) for name, loss in table.items()} for table in tables]
        dtype = torch.get_default_dtype()
        means = {}
        for name, (total, weight) in self.sum_scores(pairs).items():
            means[name] = torch.tensor(total / weight, dtype=dtype)
        return means

    def _exchange(self, tables: Sequence[Mapping[str, tuple[Any, Any]]]) -> list[_Scores]:
        """Return the tables of all replicas; learn the names that another process has."""
        rows = self.gather(self._as_rows(tables))
        if rows[:, 0].any():
            names = {name for table in tables for name in table}
            found = self._ranks.gather_objects(sorted(names))
            self._names = sorted({*self._names, *(name for part in found for name in part)})
            rows = self.gather(self._as_rows(tables))
        return [self._as_table(row) for row in rows.tolist()]

    def _as_rows(self, tables: Sequence[Mapping[str, tuple[Any, Any]]]) -> Tensor:
        """Return "is a name unknown?", then "is it there?", sum and weight for each known name."""
        rows = []
        known = set(self._names)
        for table in tables:
            row = [float(not known.issuperset(table))]
            for name in self._names:
                row += map(float, (True, *table[name]) if name in table else (False, 0, 0))
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float64, device=self._device)

    def _as_table(self, row: list[float]) -> dict[str, tuple[float, float]]:
        _, *numbers = row
        there, sums, weights = numbers[::3], numbers[1::3], numbers[2::3]
        columns = zip(self._names, there, sums, weights, strict=True)
        return {name: (total, weight) for name, is_there, total, weight in columns if is_there}

"""The replicas of a run, which of them this process runs, and what all processes do together.

A run is defined over its replicas; processes only run them. Everything that is summed over replicas
follows one tree, so its bits do not depend on the number of processes.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from helios.core.sharded_tensors import RowShare, replace_sharded, whole_of
from helios.distributed import pickling
from helios.distributed.process_groups import DistributedInfo, collective, control_group
from helios.errors import RankError, UsageError
from helios.replicas.named_sums import NumberReducer
from helios.replicas.reduction_tree import assign, tree_sum
from helios.replicas.tree_reducer import Message, PointToPoint, TreeReducer

_LONE = DistributedInfo()
Result = TypeVar("Result")
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class WindowResult:
    """The messages of all processes, sent before a window's gradients.

    Attributes:
        flags: for each flag whether any process raises it.
        means: the mean of each loss; ``None`` if no losses were sent.
        content: the bytes of rank 0.
    """

    flags: Sequence[bool]
    means: dict[str, Tensor] | None
    content: Tensor


@final
class Replicas:
    """The replicas of a run, and which of them this process runs.

    Args:
        num_replicas: logical data-parallel workers of the run (V).
        info: rank of this process and number of processes (P).
        device: the device of this process.
        is_sharded: whether models are sharded over the processes.

    Attributes:
        num_replicas: as given.
        num_processes: P.
        has_single_replica: whether there is one replica, so that nothing is shared or summed.
        has_single_process: whether this process runs all replicas.
        has_one_per_process: whether each process runs one replica.
        rank: number of this process, from 0.
        is_sharded: as given. Replicas are then assigned in waves instead of blocks.
        is_sharded_over_processes: whether models are sharded, and there are several processes.
        local_replicas: the replicas of this process, in order.
        reducer: adds gradients over replicas.
        device: as given.

    Raises:
        ArgumentError: unless 1 <= P <= V.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        info: DistributedInfo = _LONE,
        *,
        device: torch.device | str = "cpu",
        is_sharded: bool = False,
    ) -> None:
        count, rank = info.world_size, info.rank
        self.num_replicas = num_replicas
        self.num_processes = count
        self.has_single_replica = num_replicas == 1
        self.has_single_process = count == 1
        self.has_one_per_process = count == num_replicas
        self.rank = rank
        self.is_sharded = is_sharded
        self.is_sharded_over_processes = is_sharded and count > 1
        self.local_replicas = assign(count, num_replicas, in_waves=is_sharded)[rank]
        self.reducer = TreeReducer(num_replicas, num_processes=count, rank=rank)
        group = None if self.has_single_process else control_group()
        self.losses, self._scores = (
            NumberReducer(
                num_replicas, num_processes=count, rank=rank, group=group, in_waves=is_sharded
            )
            for _ in range(2)
        )
        self.device = torch.device(device)
        self._ranks = PointToPoint(count, rank, group)
        self._message: Message | None = None
        self._sent: tuple[Sequence[bool], Sequence[Mapping[str, Any]] | None] = ((), None)

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether any process raises it; a collective call."""
        if self.has_single_process:
            return flags
        raised = torch.tensor(flags, dtype=torch.uint8)
        with collective("Replicas.agree"):
            dist.all_reduce(raised, dist.ReduceOp.MAX, group=control_group())
        return tuple(map(bool, raised.tolist()))

    def find_largest(self, number: int) -> int:
        """Return the largest of the numbers of all processes; a collective call."""
        found = torch.tensor(number)
        with collective("Replicas.find_largest"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=control_group())
        return int(found)

    def send(
        self, flags: Sequence[bool], losses: Sequence[Mapping[str, Any]] | None, content: Tensor
    ) -> None:
        """Send a message with the next sum of gradients; all processes call it at one point.

        Args:
            flags: as in :meth:`agree`.
            losses: as in :meth:`mean_losses`; ``None`` on all processes for none.
            content: the bytes of rank 0; on other ranks the buffer for them.
        """
        self._sent = (flags, losses)
        if self.has_single_process:
            return
        row = torch.tensor(flags, dtype=torch.float64)
        if losses is not None:
            row = torch.cat([row, self.losses.write_losses(losses)])
        self._message = Message(self._ranks, row, content)
        self.reducer.attach(self._message)

    def receive(self) -> WindowResult:
        """Return the messages of all processes; if no gradients were summed, send them now."""
        (flags, losses), self._sent = self._sent, ((), None)
        message, self._message = self._message, None
        if message is None:
            means = None if losses is None else self.losses.mean_losses(losses)
            return WindowResult(flags, means, NOTHING)
        with collective("Replicas.receive"):
            self.reducer.deliver()
        raised, rows = message.rows[:, : len(flags)], message.rows[:, len(flags) :]
        means = None if losses is None else self.losses.read_losses(losses, rows)
        return WindowResult(raised.any(0).tolist(), means, message.content)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks.

        Values that share memory share it afterwards too; tensors of other processes are on the CPU.
        """
        if self.has_single_process:
            return [value]
        found = [b""] * self.num_processes
        with collective("Replicas.gather_objects"):
            dist.all_gather_object(found, pickling.dumps(value), group=control_group())
        return [pickling.loads(data) for data in found]

    def on_each(self, function: Callable[[], Result]) -> list[Result]:
        """Run a function in every process; returns the results by rank, which must be small.

        All processes call this at the same place. An error that only one of them can see, such as
        a damaged checkpoint, would leave the others waiting in a collective.

        Raises:
            Exception: what the function raises; if another process fails, its error, whose cause is
                a ``RankError`` that names the process.
        """
        if self.has_single_process:
            return [function()]
        value: Result | None = None
        own: Exception | None = None
        try:
            value = function()
        except Exception as error:
            own = error
        lost: Exception | None = None
        reports: list[Any] = []
        try:
            packed = None if own is None else pickling.pack_error(own)
            reports = self.gather_objects((value, packed))
        except Exception as error:
            lost = error
        # Outside the exception handlers, so that no error appears as the context of another.
        if own is not None:
            raise own
        if lost is not None:
            raise lost
        for rank, (_, packed) in enumerate(reports):
            if packed is not None:
                cause = RankError(f"Rank {rank} of {self.num_processes} has raised it first.")
                raise pickle.loads(packed) from cause
        return [result for result, _ in reports]

    def on_first(self, function: Callable[[], Result]) -> Result:
        """Run a function on rank 0; all processes get its result, which is small, or its error.

        Raises:
            Exception: what the function raises, in all processes.
        """
        results = self.on_each(lambda: function() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]

    @property
    def share(self) -> RowShare | None:
        """Which rows of sharded tensors this process holds; ``None`` if it holds all of them."""
        return RowShare(self.rank, self.num_processes) if self.is_sharded_over_processes else None

    def gather_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Return a small value of every replica, in their order.

        Args:
            values: one for each replica of this process, in order.
        """
        own = dict(zip(self.local_replicas, values, strict=True))
        return [*self.gather_by_replica(own).values()]

    def gather_by_replica(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """Return small values of replicas, by replica, in their order.

        Args:
            own: those of this process, of some of its replicas.
        """
        parts = self.gather_objects(own)
        found = {replica: value for part in parts for replica, value in part.items()}
        return dict(sorted(found.items()))

    def join_shards(self, tree: Any) -> Any:
        """Return a state with whole tensors on rank 0, and placeholders for them on the others.

        A collective call, if models are sharded over several processes; tensors are then gathered
        one by one. What occurs twice in the tree occurs twice in the result.

        Args:
            tree: dicts, lists and tuples of any values, alike on all processes; it is not changed.

        Returns:
            The tree, where rank 0 has whole tensors in host memory, and others have tensors on the
            meta device.
        """
        if not self.is_sharded_over_processes:
            return tree

        def join(_: str, value: Any) -> Tensor:
            with collective("Replicas.join_shards"):
                whole = whole_of(value.detach())
            if self.rank:
                return torch.empty(value.shape, dtype=value.dtype, device="meta")
            return whole.cpu()

        return replace_sharded(tree, join)

    def hand_over(self, content: Tensor, source: int, target: int) -> None:
        """Send bytes from one process to another; only these two take part.

        Args:
            content: bytes on the CPU; on the target a buffer of the same size, which is filled.
            source: the rank that sends.
            target: the rank that receives.
        """
        sends = [(content, target)] if self.rank == source else []
        receives = [(content, source)] if self.rank == target else []
        with collective("Replicas.hand_over"):
            self._ranks.exchange(sends, receives)

    def compare(self, check: Callable[[Callable[[Any], list[Any]]], None]) -> None:
        """Run a check over all processes, or do nothing if there is only one.

        Args:
            check: is called with :meth:`gather_objects`.
        """
        if not self.has_single_process:
            check(self.gather_objects)

    def require_one_each(self, who: str, *, why: str = "", remedy: str = "") -> None:
        """Check that each process runs one replica.

        Args:
            who: what needs it.
            why: the reason, for the message.
            remedy: an alternative to starting more processes.

        Raises:
            UsageError: if a process runs several replicas.
        """
        if self.is_sharded:
            raise UsageError(
                f"{who} needs whole models, because gradients of sharded ones are summed by "
                f'Helios only. Use sharding="none"{remedy}.'
            )
        if not self.has_one_per_process:
            raise UsageError(
                f"{who} needs one process per replica{why}, but num_replicas is "
                f"{self.num_replicas} and the number of processes is {self.num_processes}. Start "
                f"{self.num_replicas} processes{remedy}."
            )

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        if not self.has_single_process:
            with collective("Replicas.barrier"):
                dist.barrier(group=control_group())

    def add_with_losses(self, numbers: Sequence[float]) -> None:
        """Add whole numbers of all processes, exactly, with the losses that are sent next.

        Args:
            numbers: those of this process; as many on all processes.
        """
        self.losses.numbers = numbers

    def add_up(self, numbers: Sequence[float]) -> float:
        """Return the sum of a number of each replica, in float64 and in the order of the tree.

        Args:
            numbers: those of the replicas of this process, in order.
        """
        rows = torch.tensor(numbers, dtype=torch.float64)
        with nullcontext() if self.has_single_process else collective("Replicas.add_up"):
            found: list[float] = self.losses.gather(rows).tolist()
        return tree_sum(found, operator.add)

    def mean_losses(self, tables: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the mean of each loss over the replicas that have it, by name.

        Args:
            tables: the losses of each replica of this process.
        """
        if self.has_single_process:
            return self.losses.mean_losses(tables)
        with collective("Replicas.mean_losses"):
            return self.losses.mean_losses(tables)

    def sum_scores(
        self, tables: Sequence[Mapping[str, tuple[Any, Any]]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and weight of each score over all replicas, by name.

        Args:
            tables: ``{name: (sum, weight)}`` of each replica of this process.
        """
        if self.has_single_replica:
            return dict(tables[0])
        if self.has_single_process:
            return self._scores.sum_scores(tables)
        with collective("Replicas.sum_scores"):
            return self._scores.sum_scores(tables)

    def close(self) -> None:
        """Release the process group, so that nothing keeps it alive after the run."""
        self.losses, self._scores = NumberReducer(1), NumberReducer(1)
        self._ranks, self._message = PointToPoint(1, 0, None), None

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of replica 0, which rank 0 runs, in one exchange.

        Args:
            tensors: the same number of tensors, of the same shapes and types, on all processes.
        """
        if self.has_single_process or not tensors:
            return
        with torch.no_grad(), collective("Replicas.copy_from_first"):
            whole = join_bytes(tensor.to(self.device) for tensor in tensors)
            dist.broadcast(whole, 0)
            if self.rank:
                split_bytes(whole, tensors)


def join_bytes(tensors: Iterable[Tensor]) -> Tensor:
    """Return the bytes of tensors, concatenated."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else NOTHING


def split_bytes(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with the bytes that :func:`join_bytes` has joined."""
    with torch.no_grad():
        sizes = [tensor.nbytes for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(whole, sizes), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

"""The replicas of a run, which of them this process carries, and what all of them agree on.

A run is defined over its replicas; processes only carry them (DESIGN R3). Everything that is summed
over replicas follows one tree, so its bits do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from helios.core import transfer
from helios.core.group import DistributedInfo, collective, control_group
from helios.engines.reduce import NumberReducer, TreeReducer
from helios.errors import UsageError

_LONE = DistributedInfo()


@final
class Replicas:
    """The replicas of a run, and the block of them that this process carries.

    Args:
        num_replicas: logical data-parallel workers of the run (V).
        info: where this process stands among all that carry them (P).
        device: where this process computes.

    Attributes:
        num_replicas: as given.
        num_processes: P.
        is_lone: whether there is one replica, so that nothing is shared or summed.
        is_whole: whether this process carries all replicas.
        has_one_each: whether each process carries one replica.
        rank: number of this process, from 0.
        block: the replicas of this process.
        reducer: adds gradients over replicas.

    Raises:
        ArgumentError: unless 1 <= P <= V.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        info: DistributedInfo = _LONE,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        count, rank = info.world_size, info.rank
        self.num_replicas = num_replicas
        self.num_processes = count
        self.is_lone = num_replicas == 1
        self.is_whole = count == 1
        self.has_one_each = count == num_replicas
        self.rank = rank
        self.reducer = TreeReducer(num_replicas, num_processes=count, rank=rank)
        self.block = self.reducer.block
        group = None if self.is_whole else control_group()
        self._losses, self._scores = (
            NumberReducer(num_replicas, num_processes=count, rank=rank, group=group)
            for _ in range(2)
        )
        self._device = torch.device(device)

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether any process raises it; all processes ask at once."""
        if self.is_whole:
            return flags
        raised = torch.tensor(flags, dtype=torch.uint8)
        with collective("Replicas.agree"):
            dist.all_reduce(raised, dist.ReduceOp.MAX, group=control_group())
        return tuple(map(bool, raised.tolist()))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks.

        What shares memory in a value does so again; tensors of other processes lie on the CPU.
        """
        if self.is_whole:
            return [value]
        found = [b""] * self.num_processes
        with collective("Replicas.gather_objects"):
            dist.all_gather_object(found, transfer.dumps(value), group=control_group())
        return [transfer.loads(data) for data in found]

    def compare(self, check: Callable[[Callable[[Any], list[Any]]], None]) -> None:
        """Run a check over all processes; with one there is nothing to compare.

        Args:
            check: is called with :meth:`gather_objects`.
        """
        if not self.is_whole:
            check(self.gather_objects)

    def require_one_each(self, who: str, *, why: str = "", remedy: str = "") -> None:
        """Check that each process carries one replica.

        Args:
            who: what needs it.
            why: the reason, for the message.
            remedy: what else can be done than to start more processes.

        Raises:
            UsageError: if a process carries several.
        """
        if not self.has_one_each:
            raise UsageError(
                f"{who} trains with one process for each replica{why}, but {self.num_processes} "
                f"carry {self.num_replicas} replicas. Start {self.num_replicas} processes{remedy}."
            )

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if not self.is_whole:
            with collective("Replicas.barrier"):
                dist.barrier(group=control_group())

    def mean_losses(self, tables: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the mean of each loss over the replicas that have it, by name.

        Args:
            tables: the losses of each replica of this process.
        """
        if self.is_whole:
            return self._losses.mean_losses(tables)
        with collective("Replicas.mean_losses"):
            return self._losses.mean_losses(tables)

    def sum_scores(
        self, tables: Sequence[Mapping[str, tuple[Any, Any]]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and weight of each score over all replicas, by name.

        Args:
            tables: ``{name: (sum, weight)}`` of each replica of this process.
        """
        if self.is_lone:
            return dict(tables[0])
        if self.is_whole:
            return self._scores.sum_scores(tables)
        with collective("Replicas.sum_scores"):
            return self._scores.sum_scores(tables)

    def close(self) -> None:
        """Let go of the process group, so that nothing keeps it alive after the run."""
        self._losses, self._scores = NumberReducer(1), NumberReducer(1)

    def make_empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor without content, where this process computes."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of replica 0, which rank 0 carries, in one exchange.

        Args:
            tensors: the same number of tensors, of the same shapes and types, on all processes.
        """
        if self.is_whole or not tensors:
            return
        with torch.no_grad(), collective("Replicas.copy_from_first"):
            parts = [_as_bytes(tensor) for tensor in tensors]
            whole = torch.cat([part.to(self._device) for part in parts])
            dist.broadcast(whole, 0)
            if self.rank == 0:
                return
            sizes = [part.numel() for part in parts]
            for tensor, part in zip(tensors, torch.split(whole, sizes), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
